"""What a gateway on one core is to reach, and whether it did."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SHARE = 0.70  # of a bare server's messages
COALESCED, EVENTS = 100_000, 30_000  # tokens, events; by the CPU second
P99_MS = 2.0
IDLE_MIB = 1024
TWO_OF_ONE = 1.8


@dataclass(frozen=True)
class Verdict:
    """One goal."""

    goal: str
    value: float
    wanted: float
    passed: bool

    def __str__(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}: {self.goal}: {self.value:,.2f} (wanted {self.wanted:,.2f})"

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def verdicts(noted: Mapping[str, Sequence[float]]) -> list[Verdict]:
    """Of what was measured, by name: see `Bench`. Goals without a figure are left out."""

    def mean(name: str) -> float:
        return sum(noted[name]) / len(noted[name])

    told: list[Verdict] = []

    def judge(goal: str, wanted: float, value: Callable[[], float], *, most: bool = False) -> None:
        try:
            got = value()
        except KeyError:
            return
        told.append(Verdict(goal, got, wanted, got <= wanted if most else got >= wanted))

    judge("messages a CPU second, of the bare server's", SHARE, lambda: mean("messages") / mean("bare"))
    judge("tokens a CPU second, coalescing", COALESCED, lambda: mean("coalesced"))
    judge("SSE events a CPU second", EVENTS, lambda: mean("events"))
    judge("added latency p99 in ms, 25 workers of 8 streams", P99_MS, lambda: mean("latency-25"), most=True)
    judge("added latency p99 in ms, 8 workers of 25 streams", P99_MS, lambda: mean("latency-8"), most=True)
    judge("MiB with 10,000 idle streams", IDLE_MIB, lambda: mean("idle"), most=True)
    judge("two processes' messages, of one's", TWO_OF_ONE, lambda: mean("processes-2") / mean("processes-1"))
    return told
