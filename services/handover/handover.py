"""What the engine's thread asks of the KV hand-over: the seam between `Driver` and the prefill and decode roles."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from ...engine.batch import LayerHook, StepWait
from ...engine.request import Request, SequenceKey, SequenceOutput, StepResult
from ...kvtransfer.reader import Mismatches

Post: TypeAlias = Callable[[Callable[[], None]], None]
"""`Driver.post`: any thread; runs the event on the engine's thread between steps, waking it if idle."""

Emit: TypeAlias = Callable[[StepResult], None]
"""Takes outputs and failures to their sessions, exactly like a step's; on the engine's thread."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """The worker at the other end of a hand-over, as the gateway names it in `Submit.peer` and `Peers`."""

    address: str  # host:port
    incarnation: int


@dataclass(frozen=True, slots=True)
class PairSpeed:
    """How KV goes to a decode worker."""

    transport: str
    gb_per_s: float  # as probed when the link came up


@dataclass(slots=True)
class Traffic:
    """What was handed over since the start; the engine's thread counts, any may read."""

    tickets: int = 0  # given (decode) or served (prefill)
    pages: int = 0  # pushed, all layers of a page counted as one
    mismatches: Mismatches = field(default_factory=Mismatches)  # decode: what did not arrive whole
    pairs: Mapping[int, PairSpeed] = field(default_factory=dict)  # by reader; replaced, never edited


NEAR_S = 0.05
"""For so long at most a thread looks again and again for what comes within milliseconds, and does not sleep: to be
woken by another one takes longer than what is to be done then."""


class Handover(Protocol):
    """All methods run on the engine's thread and none blocks; none raises for what a peer or a gateway did.

    The driver's order is: `core.add(request)`, `submitted(request, peer)`; after each `core.step(handover.hook)` first
    `stepped(result)`, then the result's outputs and failures (and the further outputs that `stepped` returned, after
    them) go to the sessions; `gone(key)` for each key that was cancelled, expired, failed or finished, after the engine
    dropped it. `gone` is idempotent and takes unknown keys, so the driver need not know what a key was. A PREFILL
    sequence is not gone with its token 0, whether or not that finished it: its pages are needed until `Handover`
    itself calls `core.release`; the driver calls `gone` for it only when it is cancelled, expires or fails. Several
    samples of a prompt are one sequence here, named by the first, and gone once none of them is wanted.
    """

    hook: LayerHook | None
    """Handed to `core.step`."""

    wait: StepWait | None
    """Handed to `core.step`."""

    traffic: Traffic
    """See there."""

    @property
    def awake_until(self) -> float:
        """Until then, by the monotonic clock, the engine's thread does not sleep where it waits, but calls `look`."""
        ...

    def attach(self, post: Post, emit: Emit) -> None:
        """Called once by `Driver.__init__`, before the thread starts.

        `emit` is for what happens outside of a step: KV that arrived (an output that repeats token 0, perhaps with a
        finish) and KV that is lost (a failure). The engine has already dropped what is reported as finished or failed,
        and the hand-over has forgotten it; `gone` may follow and does nothing.
        """
        ...

    def look(self) -> None:
        """Posts what a peer says just now, if it does; and does what there is to do while it does not."""
        ...

    def submitted(self, request: Request, peer: PeerAddress | None) -> None:
        """After `core.add` succeeded. `peer` is None for WORK_ALL."""
        ...

    def gone(self, key: SequenceKey) -> None:
        """Cancelled, expired, failed or finished; the engine no longer has it."""
        ...

    def stepped(self, result: StepResult) -> list[SequenceOutput]:
        """After each step, before its outputs leave. Returns further outputs."""
        ...

    def tick(self, now: float) -> None:
        """About each 0.5 s, also when idle. `now`: `time.monotonic()`."""
        ...

    def check(self, *, idle: bool) -> None:
        """Raises if a ticket or a key was leaked; `idle`: no request is left anywhere."""
        ...


class NoHandover:
    """For role `both`: whole requests only."""

    hook: LayerHook | None = None
    wait: StepWait | None = None
    awake_until = 0.0

    def __init__(self) -> None:
        self.traffic = Traffic()

    def attach(self, post: Post, emit: Emit) -> None:
        """Nothing happens outside of a step."""

    def look(self) -> None:
        """Nobody says anything."""

    def submitted(self, request: Request, peer: PeerAddress | None) -> None:
        """Nothing to arrange."""

    def gone(self, key: SequenceKey) -> None:
        """Nothing to return."""

    def stepped(self, result: StepResult) -> list[SequenceOutput]:
        """Nothing to add."""
        return []

    def tick(self, now: float) -> None:
        """Nothing expires."""

    def check(self, *, idle: bool) -> None:
        """Nothing to leak."""
