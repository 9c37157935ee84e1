"""The NIXL library, by the little of it that moving pages needs. It is optional: the extra `twostroke[nixl]`.

NIXL moves memory between processes and hosts over UCX: InfiniBand or RoCE, TCP, and the kernel's own copies within a
host. The library's bindings are used directly: its convenience class lets each agent's thread spin on a core of its own
(`pthrDelay` 0), whereas with a delay that thread sleeps until something comes.
"""

import contextlib
import importlib
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..errors import ConfigError, Mismatch, TwostrokeError, Unavailable

Places: TypeAlias = npt.NDArray[np.uint64]
"""[n, 3]: address, bytes, device."""

Handle: TypeAlias = int
"""A transfer."""

_BACKEND = "UCX"
_WAKE_US = 10_000  # of the agent's own thread, where nothing wakes it before


def why_missing() -> str:
    """Why NIXL cannot be used here; empty where it can."""
    try:
        _bindings()
    except ImportError as error:
        return f"the package nixl is not installed or does not load ({error}): pip install 'twostroke[nixl]'"
    return ""


def _bindings() -> Any:
    importlib.import_module("nixl")  # chooses the build for this machine
    return importlib.import_module("nixl._bindings")


class NixlAgent:
    """One NIXL agent: what it registered can be reached by whoever has its metadata, until it is closed. Any thread."""

    def __init__(self, name: str) -> None:
        """`name`: unique among the agents that meet. ConfigError (transport) where NIXL cannot be used."""
        try:
            self._api = api = _bindings()
        except ImportError as error:
            raise ConfigError(f"transport: {why_missing()}", field="transport") from error
        config = api.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, _WAKE_US
        config.useListenThread = False
        config.syncMode = api.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent = api.nixlAgent(name, config)
            options, _ = self._agent.getPluginParams(_BACKEND)
            self._backends = [self._agent.createBackend(_BACKEND, options)]
        except Exception as error:
            raise ConfigError(f"transport: NIXL does not start: {error}", field="transport") from error
        self._registered: list[Any] = []

    def register(
        self,
        memory: Tensor,  # contiguous, in CPU or CUDA memory
    ) -> None:
        """Makes it reachable, and usable as a source. ConfigError where the network's hardware refuses it."""
        api = self._api
        entry = (memory.data_ptr(), memory.nbytes, device_of(memory), "")
        stretches = api.nixlRegDList(self._segment(memory.is_cuda), [entry])
        try:
            self._agent.registerMem(stretches, self._backends)
        except Exception as error:
            raise ConfigError(f"transport: NIXL cannot register the KV pool: {error}", field="transport") from error
        self._registered.append(stretches)

    def metadata(self) -> bytes:
        """What a peer needs to write what was registered."""
        return bytes(self._agent.getLocalMD())

    def add(self, metadata: bytes, name: str) -> None:
        """Meets another agent. Mismatch unless the metadata is readable and that of `name`."""
        try:
            found = self._agent.loadRemoteMD(metadata)
        except Exception as error:
            raise Mismatch(f"the peer's NIXL metadata cannot be used here: {error}") from error
        found = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
        if found != name:
            self.remove(found)
            raise Mismatch(f"NIXL agent: {name} expected, {found[:80]} there")

    def remove(self, name: str) -> None:
        """Forgets an agent and closes its connections, whatever has become of it."""
        with contextlib.suppress(self._api.nixlNotFoundError):
            self._agent.invalidateRemoteMD(name)

    def write(
        self,
        peer: str,
        local: Places,
        remote: Places,
        *,
        local_cuda: bool,
        remote_cuda: bool,
    ) -> Handle:
        """Begins to copy local[i] onto remote[i] of `peer`, whose sizes are equal. Unavailable where that fails."""
        api, handle = self._api, None
        try:
            sources = api.nixlXferDList(self._segment(local_cuda), local)
            targets = api.nixlXferDList(self._segment(remote_cuda), remote)
            handle = self._agent.createXferReq(api.NIXL_WRITE, sources, targets, peer, b"", self._backends)
            self._agent.postXferReq(handle, b"")
        except Exception as error:
            if handle is not None:
                self.release(handle)
            raise Unavailable(f"NIXL cannot write to {peer}: {error}") from error
        return int(handle)

    def landed(self, handle: Handle) -> bool:
        """Whether all of it is at its place, as the peer acknowledged. Unavailable where it failed."""
        try:
            state = self._agent.getXferStatus(handle)
        except Exception as error:
            raise Unavailable(f"a NIXL write failed: {error}") from error
        if state == self._api.NIXL_SUCCESS:
            return True
        if state == self._api.NIXL_IN_PROG:
            return False
        raise Unavailable(f"a NIXL write failed: {state}")

    def release(self, handle: Handle) -> bool:
        """Gives a transfer's record back. False while the transfer is still under way."""
        try:
            self._agent.releaseXferReq(handle)
        except Exception:
            return False
        return True

    def close(self) -> None:
        """Ends the agent's thread and connections, and takes back what it registered: no peer reaches it any more, not
        even with what is still in the network. May be called again.
        """
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for stretches in self._registered:
            try:
                agent.deregisterMem(stretches, self._backends)
            except Exception as error:
                raise TwostrokeError(f"NIXL does not give the KV pool back: {error}") from error
        self._registered.clear()
        del agent  # its destructor closes the connections

    def _segment(self, cuda: bool) -> Any:
        return self._api.VRAM_SEG if cuda else self._api.DRAM_SEG


def device_of(memory: Tensor) -> int:
    """The device's number as NIXL counts: 0 for CPU memory."""
    return max(memory.get_device(), 0)
