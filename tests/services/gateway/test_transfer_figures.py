"""Figures of KV between workers: of those that are connected, under names that do not multiply."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from twostroke.v1 import worker_pb2 as pb

from ..cluster import Cluster, cluster, until
from ..stand_in_worker import StandIn


def series(it: Cluster) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name and labels' values."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(it.gateway.figures.text().decode()):
        for sample in family.samples:
            labels = tuple(sample.labels[key] for key in sorted(sample.labels))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


async def told(it: Cluster, worker: StandIn, **values: object) -> None:
    """The gateway has this status of the worker's, which then falls silent."""
    worker.status(sequence=1 << 40, **values)
    await until(lambda: it.gateway.fleet.session(worker.identity.incarnation).status.sequence == 1 << 40)
    worker.frozen = True  # its beats tell less


async def test_damage_speed_and_counts(tiny_llama_dir: Path) -> None:
    p, d, gone = StandIn("prefill", "p0"), StandIn("decode", "d0"), StandIn("decode", "d1")
    async with cluster(tiny_llama_dir, p, d, gone) as it:
        assert set(series(it)["twostroke_worker_damaged_pages_total"].values()) == {0.0}
        assert "twostroke_pair_bytes_per_second" not in series(it)
        pairs = [
            pb.PairRate(reader=d.identity.incarnation, gb_per_s=350.5, transport="cuda_ipc"),
            pb.PairRate(reader=gone.identity.incarnation, gb_per_s=9.0, transport="nixl"),
            pb.PairRate(reader=12345, gb_per_s=1.0, transport="shm"),  # nobody whom the gateway knows
            pb.PairRate(reader=d.identity.incarnation, gb_per_s=1.0, transport="x" * 1000),
        ]
        await told(it, p, pushed_pages=8, tickets=7, preemptions=3, pairs=pairs)
        await told(it, d, tickets=6, damaged_pages=11, resent_pages=9, damaged_tickets=2)
        found = series(it)
        assert found["twostroke_worker_damaged_pages_total"] == {
            ("resent", "decode", "d0"): 9,
            ("given_up", "decode", "d0"): 2,
            ("resent", "decode", "d1"): 0,
            ("given_up", "decode", "d1"): 0,
            ("resent", "prefill", "p0"): 0,
            ("given_up", "prefill", "p0"): 0,
        }
        assert found["twostroke_worker_damaged_handovers_total"]["decode", "d0"] == 2
        assert found["twostroke_worker_pushed_pages_total"]["prefill", "p0"] == 8
        assert found["twostroke_worker_tickets_total"]["decode", "d0"] == 6
        assert found["twostroke_worker_preemptions_total"]["prefill", "p0"] == 3
        assert found["twostroke_pair_bytes_per_second"] == {
            ("d0", "p0", "cuda_ipc"): 350.5e9,
            ("d1", "p0", "nixl"): 9e9,
        }

        await gone.stop()
        await until(lambda: len(it.gateway.fleet.loads()) == 2)
        found = series(it)
        assert found["twostroke_pair_bytes_per_second"] == {("d0", "p0", "cuda_ipc"): 350.5e9}
        assert ("resent", "decode", "d1") not in found["twostroke_worker_damaged_pages_total"]
