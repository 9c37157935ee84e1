"""When an idle decode worker goes through the motions, and when it only waits."""

from twostroke.services.handover.handover import NEAR_S
from twostroke.services.handover.rehearsal import EVERY_S, Rehearsal


class Stage:
    def __init__(self) -> None:
        self.now = 50.0
        self.gone: list[str] = []
        ways = [lambda: self.gone.append("digests"), lambda: self.gone.append("step")]
        self.rehearsal = Rehearsal(ways, clock=lambda: self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.rehearsal.go()


def test_its_ways_take_turns_until_the_last_layers_are_there() -> None:
    stage = Stage()
    stage.rehearsal.go()
    assert (stage.gone, stage.rehearsal.until) == ([], 0.0)
    stage.rehearsal.near(rest=False)
    assert stage.rehearsal.until == stage.now + NEAR_S
    for _ in range(3):
        stage.passes(EVERY_S)
        stage.passes(EVERY_S / 4)  # too soon
    assert stage.gone == ["digests", "step", "digests"]
    stage.rehearsal.near(rest=True)
    stage.passes(EVERY_S)
    assert len(stage.gone) == 3
    assert stage.rehearsal.until > stage.now
    stage.rehearsal.over()
    assert stage.rehearsal.until == 0.0


def test_nothing_follows_an_end() -> None:
    stage = Stage()
    stage.rehearsal.near(rest=False)
    stage.rehearsal.over()
    stage.passes(1.0)
    assert stage.gone == []
