"""The calls of CUDA that torch does not offer. Importable, and typed, where neither a GPU nor cuda-bindings is."""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, TwostrokeError

HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_BATCH_VERSION = 12080  # the entry point's first form, which every later driver has too
_SOURCE_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a source may be written by what the stream waits for
_OVERLAP_WITH_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: copy engines, no multiprocessors


class CudaError(TwostrokeError):
    """A call into CUDA failed."""

    def __init__(self, call: str, code: int, text: str) -> None:
        """`code`: of cudaError_t or CUresult."""
        super().__init__(f"{call} failed: {text} ({code})")
        self.code = code


def check_bindings() -> None:
    """ConfigError (device), naming the package, where KV cannot be moved between GPUs."""
    _bindings("runtime")


def malloc(nbytes: int, device: int) -> int:
    """Address of so much memory of its own on that device; its content is undefined."""
    _choose(device)
    return int(_call("cudaMalloc", nbytes))


def free(address: int) -> None:
    """Gives memory of `malloc` back."""
    _call("cudaFree", address)


def export_memory(address: int) -> bytes:
    """The handle of memory of `malloc` by which another process of this host opens it."""
    handle = _call("cudaIpcGetMemHandle", address)
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def open_memory(handle: bytes, device: int) -> int:
    """Maps another process's memory for a device of ours, which thereby reaches it whatever device it is on."""
    if len(handle) != HANDLE_BYTES:
        raise ValueError(f"a handle of {len(handle)} bytes")
    _choose(device)
    opened = _bindings("runtime").cudaIpcMemHandle_t()
    ctypes.memmove(opened.getPtr(), handle, HANDLE_BYTES)
    return int(_call("cudaIpcOpenMemHandle", opened, _LAZY_PEER_ACCESS))


def close_memory(address: int, device: int) -> None:
    """Unmaps what `open_memory` mapped for that device."""
    _choose(device)
    _call("cudaIpcCloseMemHandle", address)


_POINTER = 1  # CU_MEMCPY_OPERAND_TYPE_POINTER
_PLACE = ("address", "row_bytes", "layer_rows")
COPY_BOX = np.dtype(
    {
        "names": [
            *(f"{end}_{name}" for end in ("source", "target") for name in ("type", *_PLACE)),
            *("width", "rows", "layers", "source_order", "flags"),
        ],
        "formats": [*(["i4", "u8", "u8", "u8"] * 2), *["u8"] * 3, "i4", "u4"],
        "offsets": [0, 8, 16, 24, 40, 48, 56, 64, 80, 88, 96, 104, 108],
        "itemsize": 112,
    }
)
"""CUDA_MEMCPY3D_BATCH_OP between linear memories: `rows` of `width` bytes in each of `layers`. From one row to the next
it is `row_bytes`, from one layer to the next `layer_rows` such rows. The hints between them are for managed memory."""


def copy_boxes(count: int) -> npt.NDArray[np.void]:
    """So many, with all set but places and sizes."""
    boxes = np.zeros(count, COPY_BOX)
    boxes["source_type"] = boxes["target_type"] = _POINTER
    boxes["source_order"], boxes["flags"] = _SOURCE_IN_STREAM_ORDER, _OVERLAP_WITH_COMPUTE
    return boxes


class BatchCopy:
    """`cuMemcpy3DBatchAsync` on boxes that lie ready. A box takes neighbouring pages in all layers of a stretch: of
    many layers and pieces a copy for each layer (`cuMemcpyBatchAsync`) takes the host five times as long.
    """

    def __init__(self) -> None:
        """ConfigError (device) where the driver is older than CUDA 12.8."""
        driver = _bindings("driver")
        code, address, *_ = driver.cuGetProcAddress(b"cuMemcpy3DBatchAsync", _BATCH_VERSION, 0)
        if int(code) or not int(address):
            raise ConfigError("device: the driver cannot copy in batches; CUDA 12.8 or later is needed", field="device")
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p
        )
        self._copy = kind(int(address))
        self._failed = ctypes.c_size_t(0)
        self._failed_at = ctypes.byref(self._failed)

    def __call__(self, boxes: int, count: int, stream: int) -> None:
        """Launches `count` (> 0) copies; the address of an array of COPY_BOX, free for other use after the call."""
        code = self._copy(count, boxes, self._failed_at, 0, stream)
        if code:
            raise CudaError("cuMemcpy3DBatchAsync", code, f"copy {self._failed.value} of {count}")


def _choose(device: int) -> None:
    """Makes it the thread's current one for the bindings too, whose runtime is another copy than torch's."""
    _call("cudaSetDevice", device)


def _bindings(name: str) -> Any:
    try:
        from cuda.bindings import driver, runtime
    except ImportError as error:
        raise ConfigError(
            "device: KV goes between GPUs by CUDA IPC, for which the package cuda-bindings is missing (torch's CUDA "
            "build brings it): `pip install cuda-bindings`",
            field="device",
        ) from error
    return {"runtime": runtime, "driver": driver}[name]


def _call(name: str, *arguments: Any) -> Any:
    """A call of the runtime: its only result, or none."""
    runtime = _bindings("runtime")
    code, *results = getattr(runtime, name)(*arguments)
    if int(code):
        _, text = runtime.cudaGetErrorString(code)
        raise CudaError(name, int(code), text.decode() if isinstance(text, bytes) else str(text))
    return results[0] if results else None
