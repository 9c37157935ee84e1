"""On which GPU each worker of a stack runs: what the plan tells it, on a machine with as many as the test says."""

import pytest

from twostroke.errors import ConfigError
from twostroke.services.configure import load_up
from twostroke.services.settings import GatewaySettings, UpSettings, WorkerSettings
from twostroke.services.supervisor.devices import spread
from twostroke.services.supervisor.machine import visible_gpus
from twostroke.services.supervisor.up import plan

from .test_up import settings_of


def told(up: UpSettings, worker: WorkerSettings, gpus: int | None) -> dict[str, tuple[str, float]]:
    """(device, share of memory) of each worker, as its command line says. `gpus` None: nobody may ask."""

    def count() -> int:
        assert gpus is not None
        return gpus

    _, workers = settings_of(plan(up, GatewaySettings(listen="127.0.0.1:0", http_listen="off"), worker, gpus=count))
    return {worker.name: (worker.device, worker.gpu_memory) for worker in workers}


CUDA = WorkerSettings(role="both", device="cuda")


def test_one_gpu_a_worker() -> None:
    assert told(UpSettings(), CUDA, 8) == {"prefill-0": ("cuda:0", 0.9), "decode-0": ("cuda:1", 0.9)}
    placed = told(UpSettings(prefill=1, decode=2, both=1), CUDA, 4)
    assert [device for device, _ in placed.values()] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert set(placed) == {"prefill-0", "decode-0", "decode-1", "both-0"}


def test_workers_that_share_a_gpu_divide_its_memory() -> None:
    placed = told(UpSettings(prefill=2, decode=3), CUDA, 2)
    assert placed == {
        "prefill-0": ("cuda:0", 0.9 / 3),
        "prefill-1": ("cuda:0", 0.9 / 3),
        "decode-0": ("cuda:0", 0.9 / 3),
        "decode-1": ("cuda:1", 0.45),
        "decode-2": ("cuda:1", 0.45),
    }
    one = WorkerSettings(role="both", device="cuda:1")
    assert set(told(UpSettings(), one, None).values()) == {("cuda:1", 0.45)}


@pytest.mark.parametrize(
    ("devices", "count", "found"),
    [("a", 3, "aaa"), ("ab", 4, "aabb"), ("ab", 5, "aaabb"), ("abc", 2, "ab"), ("abc", 3, "abc"), ("aab", 3, "aab")],
)
def test_spread_is_even_and_neighbours_share(devices: str, count: int, found: str) -> None:
    assert "".join(spread(devices, count)) == found


def test_named_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """By flag and by variable; in the order of the roles."""
    monkeypatch.delenv("TWOSTROKE_DEVICES", raising=False)
    up, _, worker = load_up({"prefill": 1, "decode": 3, "devices": ("cuda:3,cuda:1", "cuda:2", "cuda:2")})
    assert told(up, worker, None) == {
        "prefill-0": ("cuda:3", 0.9),
        "decode-0": ("cuda:1", 0.9),
        "decode-1": ("cuda:2", 0.45),
        "decode-2": ("cuda:2", 0.45),
    }
    monkeypatch.setenv("TWOSTROKE_DEVICES", "cuda:5")
    up, _, worker = load_up({"both": 1, "prefill": 0, "decode": 0})
    assert told(up, worker, None) == {"both-0": ("cuda:5", 0.9)}
    with pytest.raises(ConfigError, match=r"devices: got .*, takes GPUs, cuda:N,cuda:N"):
        load_up({"devices": ("cuda:0,cpu",)})


def test_a_share_that_was_given_is_each_workers_own() -> None:
    given = WorkerSettings(role="both", device="cuda", gpu_memory=0.4)
    assert set(told(UpSettings(), given, 1).values()) == {("cuda:0", 0.4)}
    with pytest.raises(ConfigError, match=r"got 0\.4, takes at most 0\.33, as 3 workers share cuda:0") as caught:
        told(UpSettings(decode=2), given, 1)
    assert caught.value.field == "gpu_memory"
    in_bytes = WorkerSettings(role="both", device="cuda", gpu_memory=60 << 30)
    assert set(told(UpSettings(decode=2), in_bytes, 1).values()) == {("cuda:0", 60 << 30)}


def test_no_gpu_is_said_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="no GPU can be seen") as caught:
        told(UpSettings(), CUDA, 0)
    assert caught.value.field == "device"
    assert visible_gpus() >= 0


def test_a_cpu_is_shared_and_nobody_counts_gpus() -> None:
    assert set(told(UpSettings(decode=3), WorkerSettings(role="both"), None).values()) == {("cpu", 0.9)}
