"""A decode worker's pool, opened over NIXL to one prefill worker."""

import itertools
import re
import struct
from dataclasses import dataclass

from torch import Tensor

from ..errors import ConfigError, Mismatch
from .nixl_agent import NixlAgent, device_of

MAX_METADATA = 1 << 16
_HEADER = struct.Struct("<8sQQQIB3x")  # magic, incarnation, address, bytes of the pool, device, whether that is a GPU
_MAGIC = b"2strkNX1"
_NAME = re.compile(r"twostroke-[0-9a-f]{16}-\d{1,12}", re.ASCII)
_NAME_BYTES = 48
_numbers = itertools.count(1)


def agent_name(incarnation: int) -> str:
    """A new name for an agent of that process."""
    return f"twostroke-{incarnation:016x}-{next(_numbers)}"


@dataclass(frozen=True, slots=True)
class NixlPool:
    """What a writer must know of a pool."""

    agent: str
    address: int
    nbytes: int
    device: int
    cuda: bool
    metadata: bytes

    def pack(self, incarnation: int) -> bytes:
        """As it goes over the wire."""
        header = _HEADER.pack(_MAGIC, incarnation, self.address, self.nbytes, self.device, self.cuda)
        return header + self.agent.encode("ascii").ljust(_NAME_BYTES, b"\0") + self.metadata

    @classmethod
    def unpack(cls, descriptor: bytes, *, incarnation: int, nbytes: int) -> "NixlPool":
        """Of a peer. Mismatch unless it is that incarnation's pool of just `nbytes`."""
        start = _HEADER.size + _NAME_BYTES
        if not start < len(descriptor) <= start + MAX_METADATA:
            raise Mismatch(f"not a NIXL descriptor: {len(descriptor)} bytes")
        magic, owner, address, size, device, cuda = _HEADER.unpack_from(descriptor)
        if magic != _MAGIC:
            raise Mismatch("not a NIXL descriptor")
        if (owner, size) != (incarnation, nbytes):
            raise Mismatch(
                f"the peer's pool: {size} bytes of {owner:016x}, expected {nbytes} bytes of {incarnation:016x}"
            )
        name = descriptor[_HEADER.size : start].rstrip(b"\0").decode("ascii", "replace")
        if _NAME.fullmatch(name) is None or not name.startswith(f"twostroke-{incarnation:016x}-"):
            raise Mismatch(f"NIXL agent: one of {incarnation:016x} expected, {name!r} there")
        if address + size > 1 << 64:
            raise Mismatch("the peer's pool does not lie in memory")
        return cls(name, address, size, device, bool(cuda), descriptor[start:])


class NixlExport:
    """The pool, for one writer. Closing it ends that writer's access, whatever it does and whatever is in the network.

    Each writer has its own, because that is the only way to be certain of the last: a killed writer's bytes may wait in
    a socket of ours, from which UCX would still put them into the pool.
    """

    def __init__(
        self,
        pool: Tensor,  # [nbytes] uint8, in CPU or CUDA memory
        incarnation: int,
    ) -> None:
        """`incarnation`: ours. Takes some 50 ms. ConfigError (transport) where NIXL cannot be used."""
        name = agent_name(incarnation)
        self._agent = NixlAgent(name)
        self._pool: Tensor | None = pool
        self._agent.register(pool)
        metadata = self._agent.metadata()
        if len(metadata) > MAX_METADATA:
            raise ConfigError(f"transport: NIXL's metadata takes {len(metadata)} bytes", field="transport")
        known = NixlPool(name, pool.data_ptr(), pool.nbytes, device_of(pool), pool.is_cuda, metadata)
        self.descriptor = known.pack(incarnation)

    def close(self) -> None:
        """See above; takes some 100 ms. May be called again."""
        self._agent.close()
        self._pool = None
