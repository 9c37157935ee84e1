"""On which GPU each worker of a stack runs, and how much of its memory it takes."""

from collections import Counter
from collections.abc import Callable, Sequence

from ...errors import ConfigError
from ..settings import UpSettings, WorkerSettings


def placed(up: UpSettings, worker: WorkerSettings, count: int, gpus: Callable[[], int]) -> list[tuple[str, float]]:
    """(device, `gpu_memory`) of each of `count` workers, in the stack's order.

    `gpus`: how many this process sees; asked where nothing says which ones. A share of memory that nobody asked for is
    divided among those that share a GPU; one that somebody did is a worker's own. ConfigError where that is too much,
    or there is no GPU.
    """
    devices = spread(_devices(up, worker, gpus), count)
    sharing = Counter(devices)
    return [(device, _memory(worker, device, sharing[device])) for device in devices]


def spread(devices: Sequence[str], count: int) -> list[str]:
    """One of `devices` for each of `count` workers: evenly, and where some must share, neighbours.

    Workers stand by role, so that prefill and decode share a GPU only where there is no other way.
    """
    return [devices[index * min(len(devices), count) // count] for index in range(count)]


def _devices(up: UpSettings, worker: WorkerSettings, gpus: Callable[[], int]) -> list[str]:
    if up.devices:
        return up.devices
    if worker.device != "cuda":
        return [worker.device]
    if not (count := gpus()):
        raise ConfigError(
            "device: got cuda, but no GPU can be seen: look at nvidia-smi, CUDA_VISIBLE_DEVICES and torch's build",
            field="device",
        )
    return [f"cuda:{index}" for index in range(count)]


def _memory(worker: WorkerSettings, device: str, sharing: int) -> float:
    share = worker.gpu_memory
    if device == "cpu" or sharing == 1 or share > 1:  # bytes are checked by whoever knows how many there are
        return share
    if "gpu_memory" not in worker.model_fields_set:
        return share / sharing
    if share * sharing > 1:
        raise ConfigError(
            f"gpu_memory: got {share:g}, takes at most {1 / sharing:.2g}, as {sharing} workers share {device}; "
            "left out, it is divided among them",
            field="gpu_memory",
        )
    return share
