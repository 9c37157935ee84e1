"""When an idle decode worker goes through the motions, when it looks, and when it only waits."""

from collections.abc import Callable

import pytest

from twostroke.kvtransfer.messages import Progress
from twostroke.kvtransfer.reader import Reader
from twostroke.services.handover.handover import NEAR_S
from twostroke.services.handover.rehearsal import EVERY_S, Rehearsal

LAYERS, WRITER, PAGES = 32, 3, (1, 2)


class Lane:
    def __init__(self) -> None:
        self.paused_until: float | None = None
        self.looked = 0

    def pause(self, until: float) -> None:
        self.paused_until = until

    def resume(self) -> None:
        self.paused_until = None

    def look(self) -> None:
        self.looked += 1


class Stage:
    """Two tickets of a writer that speaks by a lane."""

    def __init__(self, *, eager: bool = True) -> None:
        self.now, self.gone, self.own = 50.0, list[str](), Lane()
        self.known: Lane | None = self.own
        self.way: Callable[[str], None] = self.gone.append
        reader = Reader(layers=LAYERS, page_size=4, pool=1)
        reader.writer_up(WRITER, 0.0)
        for key in ("a", "b"):
            reader.open(WRITER, key, PAGES, 0, 0.0)
        ways = (lambda: self.way("step"), lambda: self.way("digests"))
        clock = lambda: self.now  # noqa: E731
        self.rehearsal = Rehearsal(reader, self, ways, layers=LAYERS, eager=eager, clock=clock)  # type: ignore[arg-type]

    def lane(self, writer: int) -> Lane | None:
        return self.known

    def told(self, *entries: tuple[int, int, int]) -> None:
        self.rehearsal.told(WRITER, Progress(entries))

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.rehearsal.look()


def test_its_ways_take_turns_until_the_last_layers_are_there() -> None:
    stage = Stage()
    stage.passes(1.0)
    assert (stage.gone, stage.rehearsal.until, stage.own.looked) == ([], 0.0, 0)
    stage.told((1, 30, 2))
    assert stage.rehearsal.until == stage.own.paused_until == stage.now + NEAR_S
    for _ in range(3):
        stage.passes(EVERY_S)
        stage.passes(EVERY_S / 4)  # too soon
    assert stage.gone == ["digests", "step", "digests"]
    assert stage.own.looked == 6
    stage.told((2, 1, 2), (1, 32, 2))  # the other one is far from it
    stage.passes(EVERY_S)
    assert len(stage.gone) == 3
    assert stage.rehearsal.until > stage.now
    stage.rehearsal.sleep()
    assert (stage.rehearsal.until, stage.own.paused_until is None) == (0.0, False)
    stage.rehearsal.over()
    assert stage.own.paused_until is None
    stage.passes(1.0)
    assert (len(stage.gone), stage.own.looked) == (3, 7)


@pytest.mark.parametrize("why", ["on a CPU", "no lane"])
def test_else_a_step_is_rehearsed_once_as_layers_come(why: str) -> None:
    stage = Stage(eager=why == "no lane")
    if why == "no lane":
        stage.known = None
    for layers in (16, 30, 32):
        stage.told((1, layers, 2))
        assert stage.rehearsal.until == 0.0
    stage.passes(1.0)
    assert stage.gone == ["step", "step"]
    assert stage.own.paused_until is None


def test_what_is_far_from_its_end_is_not_looked_for() -> None:
    stage = Stage()
    stage.told((1, 27, 2))
    stage.told((1, 32, 1))  # another chunk follows
    assert (stage.rehearsal.until, stage.gone) == (0.0, ["step"])


def test_one_that_fails_is_the_last(caplog: pytest.LogCaptureFixture) -> None:
    stage, tried = Stage(), list[str]()

    def fails(name: str) -> None:
        tried.append(name)
        raise RuntimeError("no memory")

    stage.way = fails
    stage.told((1, 16, 2))
    stage.told((1, 30, 2))
    for _ in range(5):
        stage.passes(EVERY_S)
    assert tried == ["step", "digests"]
    assert caplog.text.count("a rehearsal failed") == 2
    assert stage.own.looked == 5
