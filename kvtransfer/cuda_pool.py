"""A pool of KV pages in a GPU's memory: the decode worker makes it, prefill workers of the host map and write it."""

import struct
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, Mismatch
from . import cuda_runtime as cuda

_DESCRIPTOR = struct.Struct(f"<8sQQ{cuda.HANDLE_BYTES}s")  # magic, incarnation, bytes of the pool, handle
_MAGIC = b"2strkGP1"
_GRANULE = 2 << 20  # what is smaller would share its memory, and thus its handle, with others
_NO_MEMORY = 2  # cudaErrorMemoryAllocation


class CudaPool:
    """The owner's side. An allocation of its own: what torch's allocator gives cannot be opened by every device."""

    kind = "cuda_ipc"

    def __init__(self, address: int, nbytes: int, incarnation: int, device: torch.device, handle: bytes) -> None:
        """Use `create`."""
        self.nbytes = nbytes
        self.descriptor = pack(incarnation, nbytes, handle)
        self._tensor: Tensor | None = tensor_at(address, nbytes, device)

    @classmethod
    def create(cls, nbytes: int, *, device: str, incarnation: int) -> "CudaPool":
        """Takes and zeroes `nbytes` (> 0) of the device. ConfigError (device, gpu_memory) where that cannot be."""
        if nbytes <= 0:
            raise ValueError(f"a pool needs at least one byte, not {nbytes}")
        cuda.check_bindings()
        place = torch.device(device)
        try:
            with torch.cuda.device(place):
                torch.cuda.current_stream().synchronize()  # the device's context exists from here on
                address = cuda.malloc(-(-nbytes // _GRANULE) * _GRANULE, torch.cuda.current_device())
                pool = cls(address, nbytes, incarnation, place, cuda.export_memory(address))
                pool.tensor.zero_()
                torch.cuda.current_stream().synchronize()
        except cuda.CudaError as error:
            field = "gpu_memory" if error.code == _NO_MEMORY else "device"
            message = f"{field}: no pool of {nbytes / 2**30:.2f} GiB on {device}: {error.message}"
            raise ConfigError(message, field=field) from error
        return pool

    @property
    def tensor(self) -> Tensor:
        """The pool, flat: [nbytes] uint8. Raises ValueError once closed."""
        if self._tensor is None:
            raise ValueError("the pool is closed")
        return self._tensor

    def close(self) -> None:
        """The memory goes with the process, and stays until the last peer has let go: to free it under one that has it
        mapped is undefined.
        """
        self._tensor = None


class PeerCudaPool:
    """Another process's pool, mapped for a device of ours."""

    def __init__(self, address: int, nbytes: int, device: torch.device) -> None:
        """Use `open`."""
        self.address = address
        self.nbytes = nbytes
        self._device = device
        self._open = True

    @classmethod
    def open(cls, descriptor: bytes, *, device: torch.device, incarnation: int, nbytes: int) -> "PeerCudaPool":
        """Maps the pool that `descriptor` (a `CudaPool.descriptor` of a process of this host) names.

        `device`: ours, from which it is written. Raises Mismatch unless it is that incarnation's, of just `nbytes`, and
        can be reached.
        """
        handle = unpack(descriptor, incarnation, nbytes)
        cuda.check_bindings()
        try:
            with torch.cuda.device(device):  # opened for this device, or no kernel of ours may touch it
                torch.cuda.current_stream().synchronize()
                return cls(cuda.open_memory(handle, torch.cuda.current_device()), nbytes, device)
        except cuda.CudaError as error:
            raise Mismatch(f"the peer's pool cannot be mapped for {device}: {error.message}") from error

    def close(self) -> None:
        """Unmaps it: a dead owner's memory is free only then. No copy may be under way. May be called again."""
        if self._open:
            self._open = False
            with torch.cuda.device(self._device):
                cuda.close_memory(self.address, torch.cuda.current_device())


class _Memory:
    """Memory as torch takes it without copying."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def tensor_at(address: int, nbytes: int, device: torch.device) -> Tensor:  # [nbytes] uint8
    """A tensor over memory that is not torch's."""
    tensor = torch.as_tensor(_Memory(address, nbytes), device=device)
    if tensor.data_ptr() != address or tensor.numel() != nbytes:
        raise Mismatch(f"torch does not take memory of {device} as it is")
    return tensor


def pack(incarnation: int, nbytes: int, handle: bytes) -> bytes:
    """A descriptor."""
    return _DESCRIPTOR.pack(_MAGIC, incarnation, nbytes, handle)


def unpack(descriptor: bytes, incarnation: int, nbytes: int) -> bytes:
    """The handle in a peer's descriptor; Mismatch unless all else in it is as expected."""
    if len(descriptor) != _DESCRIPTOR.size:
        raise Mismatch(f"a descriptor of {len(descriptor)} bytes, expected {_DESCRIPTOR.size}")
    magic, owner, size, handle = _DESCRIPTOR.unpack(descriptor)
    if magic != _MAGIC:
        raise Mismatch("not a descriptor of a pool on a GPU")
    if owner != incarnation:
        raise Mismatch(f"the pool of {owner:016x}, expected that of {incarnation:016x}")
    if size != nbytes:
        raise Mismatch(f"the peer's pool has {size} bytes, expected {nbytes}")
    return bytes(handle)
