"""What this machine has and lacks for twostroke."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from .. import __version__
from .supervisor.machine import cores, listen_error, memory_bytes

Verdict = Literal["ok", "warning", "missing"]
NEEDED_MEMORY = 3 << 30  # two workers with the default pool, the gateway, and the model twice
NEEDED_SHM = 1 << 30  # a default pool


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `missing`: twostroke cannot work without it."""

    name: str
    verdict: Verdict
    value: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def examine(*, listen: str, models_dir: Path | None, shm_dir: Path) -> list[Finding]:
    """Looks at everything; takes about as long as importing torch."""
    looks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _packages,
        _torch,
        _cores_and_memory,
        lambda: _shm(shm_dir),
        _pidfd,
        _triton,
        lambda: _port(listen),
        lambda: _models(models_dir),
    ]
    return [finding for look in looks for finding in look()]


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def _python() -> Iterator[Finding]:
    fits = sys.version_info >= (3, 11)
    yield Finding("twostroke", "ok", __version__)
    yield Finding(
        "python", "ok" if fits else "missing", platform.python_version(), "" if fits else "install 3.11 or newer"
    )
    linux = sys.platform == "linux"
    yield Finding("system", "ok" if linux else "warning", platform.platform(), "" if linux else "only Linux is tested")


def _packages() -> Iterator[Finding]:
    for name in ("grpcio", "protobuf", "uvloop", "tokenizers", "safetensors", "gguf"):
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "missing", "not installed", "pip install twostroke")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch", "missing", str(error).splitlines()[0], "pip install torch")
        return
    yield Finding("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        yield Finding("gpu", "ok", ", ".join(f"{device.name} ({_gib(device.total_memory)})" for device in devices))
    else:
        reason = "torch is a CPU build" if torch.version.cuda is None else "torch sees no CUDA device"
        yield Finding("gpu", "ok", f"none ({reason}); workers run on the CPU")


def _triton() -> Iterator[Finding]:
    here = importlib.util.find_spec("triton") is not None
    yield Finding("triton", "ok", importlib.metadata.version("triton") if here else "none (needed on GPUs only)")


def _cores_and_memory() -> Iterator[Finding]:
    count = cores()
    few = count < 2
    yield Finding(
        "cores", "warning" if few else "ok", str(count), "prefill and decode will share one core" if few else ""
    )
    available, total = memory_bytes()
    tight = 0 < available < NEEDED_MEMORY
    yield Finding(
        "memory",
        "warning" if tight or not total else "ok",
        f"{_gib(available)} of {_gib(total)} available" if total else "unknown",
        "lower --kv-memory" if tight else "",
    )


def _shm(directory: Path) -> Iterator[Finding]:
    name = f"shm ({directory})"
    if not (directory.is_dir() and os.access(directory, os.W_OK)):
        yield Finding(name, "missing", "no folder to write in", "name another with --shm-dir")
        return
    free = shutil.disk_usage(directory).free
    low = free < NEEDED_SHM
    remedy = "lower --kv-memory, enlarge it, or name another folder with --shm-dir" if low else ""
    yield Finding(name, "warning" if low else "ok", f"{_gib(free)} free", remedy)


def _pidfd() -> Iterator[Finding]:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        yield Finding(
            "pidfd", "missing", str(error), "workers need Linux 5.3 or newer, and a sandbox that allows pidfd_open"
        )
    else:
        yield Finding("pidfd", "ok", "supported")


def _port(listen: str) -> Iterator[Finding]:
    why = listen_error(listen)
    if why is None:
        yield Finding(f"port {listen}", "ok", "free")
    else:
        yield Finding(f"port {listen}", "warning", why, "a gateway may run there already; take another with --listen")


def _models(models_dir: Path | None) -> Iterator[Finding]:
    from ..engine.models import cached

    found = cached(models_dir)
    if found:
        yield Finding("models", "ok", ", ".join(model.name for model in found))
    else:
        yield Finding("models", "warning", "none cached", "twostroke models pull")
