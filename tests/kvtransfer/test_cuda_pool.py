"""Descriptors of pools on a GPU, and what a machine without one says. With one: see test_cuda_ipc.py."""

import importlib.util
import sys

import pytest
import torch

from twostroke.errors import ConfigError, Mismatch
from twostroke.kvtransfer import cuda_runtime
from twostroke.kvtransfer.cuda_pool import CudaPool, PeerCudaPool, pack, unpack

HANDLE = bytes(range(64))
without_bindings = pytest.mark.skipif(importlib.util.find_spec("cuda") is not None, reason="cuda-bindings are here")


def test_a_descriptor_gives_the_handle_to_whom_it_is_for() -> None:
    assert unpack(pack(7, 1 << 40, HANDLE), 7, 1 << 40) == HANDLE


@pytest.mark.parametrize(
    ("descriptor", "says"),
    [
        (pack(8, 100, HANDLE), "0000000000000008, expected that of 0000000000000007"),
        (pack(7, 99, HANDLE), "99 bytes, expected 100"),
        (pack(7, 100, HANDLE)[:-1], "87 bytes, expected 88"),
        (pack(7, 100, HANDLE) + b"x", "89 bytes"),
        (b"x" * 88, "not a descriptor"),
        (b"", "0 bytes"),
    ],
)
def test_any_other_is_refused(descriptor: bytes, says: str) -> None:
    with pytest.raises(Mismatch, match=says):
        unpack(descriptor, 7, 100)
    with pytest.raises(Mismatch, match=says):
        PeerCudaPool.open(descriptor, device=torch.device("cuda:0"), incarnation=7, nbytes=100)


@without_bindings
def test_a_missing_package_is_named() -> None:
    with pytest.raises(ConfigError, match="cuda-bindings") as caught:
        cuda_runtime.check_bindings()
    assert caught.value.field == "device"
    with pytest.raises(ConfigError, match="cuda-bindings"):
        CudaPool.create(100, device="cuda:0", incarnation=7)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        CudaPool.create(0, device="cuda:0", incarnation=7)


class _Runtime:
    """Answers as the bindings do."""

    @staticmethod
    def cudaMalloc(nbytes: int) -> tuple[int, int | None]:  # noqa: N802
        return (0, 4096) if nbytes < 100 else (2, None)

    @staticmethod
    def cudaSetDevice(device: int) -> tuple[int]:  # noqa: N802
        return (0 if device == 1 else 101,)

    @staticmethod
    def cudaGetErrorString(code: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"what went wrong"


def test_codes_become_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runtime, "_bindings", lambda name: _Runtime)
    assert cuda_runtime.malloc(10, 1) == 4096
    with pytest.raises(cuda_runtime.CudaError, match=r"cudaMalloc failed: what went wrong \(2\)") as caught:
        cuda_runtime.malloc(1000, 1)
    assert caught.value.code == 2
    with pytest.raises(cuda_runtime.CudaError, match="cudaSetDevice"):
        cuda_runtime.malloc(10, 0)


def test_the_transport_is_imported_without_triton() -> None:
    """A CPU machine has none."""
    import subprocess

    code = (
        "import sys; sys.modules['triton'] = None; import twostroke.kvtransfer.cuda_ipc, "
        "twostroke.kvtransfer.cuda_pool, twostroke.services.handover.gpu_pool, twostroke.services.worker.worker_role"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
