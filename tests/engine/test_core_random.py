"""EngineCore under generated histories: everything that may happen to sequences, in any order, on pools of any size.

Outputs are compared with a pure function of the prompt (the fake runner reads its context back through the pages), the
records are checked after each event, and at the end everything must drain. The checks are checked: planted faults must
each be caught.
"""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from twostroke.engine.block_pool import BlockPool
from twostroke.engine.core import EngineCore
from twostroke.engine.postprocess import Postprocessor
from twostroke.engine.prefix_cache import PendingPages, PrefixCache
from twostroke.engine.request import SequenceKey, Work
from twostroke.engine.roster import Roster
from twostroke.engine.scheduler import Scheduler
from twostroke.engine.sequence import Sequence
from twostroke.errors import TwostrokeError

from .history import History, Walk

QUICK = settings(max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))


def test_generated_histories() -> None:
    run_state_machine_as_test(History, settings=QUICK)  # type: ignore[no-untyped-call]


@pytest.mark.slow
def test_many_generated_histories() -> None:
    run_state_machine_as_test(History, settings=settings(QUICK, max_examples=3000))  # type: ignore[no-untyped-call]


def test_long_histories() -> None:
    seen: Counter[str] = Counter()
    for seed in range(80):
        walk = Walk(seed)
        walk.run(250)
        engine = walk.history.engine
        seen["ended"] += len(engine.ends)
        seen["found a prefix"] += sum(1 for o in engine.firsts.values() if o.timings and o.timings.cached_tokens)
        seen["reserved"] += len(engine.reserved)
        seen["copied"] += len(engine.runner.copies)
        seen["two steps on their way"] += getattr(engine.runner, "most_on_the_way", 0) > 1
        seen["preempted with samples"] += sum(key.sample > 0 for key in engine.preempted)
        for work in Work:
            seen[f"{work.name} with samples ended"] += sum(
                engine.requests[key].work is work and key.sample > 0 for key in engine.ends
            )
            seen[f"preempted {work.name}"] += sum(engine.requests[key].work is work for key in engine.preempted)
    assert min(seen.values()) > 25, seen


@pytest.mark.slow
def test_very_long_histories() -> None:
    for seed in range(1000, 1100):
        Walk(seed).run(800)


Plant = Callable[[pytest.MonkeyPatch], None]


def frees_held_pages(patch: pytest.MonkeyPatch) -> None:
    """Cancelling gives the ticket's references back too."""
    drop = EngineCore.cancel

    def cancel(self: EngineCore, key: SequenceKey) -> bool:
        known = drop(self, key)
        for name in self.pool.holds():
            if name[1] == key:  # type: ignore[index]
                self.pool.unhold(name)
                self.pool.hold(name, [])
        return known

    patch.setattr(EngineCore, "cancel", cancel)


def registers_early(patch: pytest.MonkeyPatch) -> None:
    """Pages are findable from admission on."""
    enter = Roster.enter

    def early(self: Roster, sequence: Sequence, hits: list[int], fresh: int, private: int = 0) -> None:
        enter(self, sequence, hits, fresh, private)
        for page, digest in zip(sequence.pages, sequence.chain, strict=False):
            self.pool.register(page, digest)

    patch.setattr(Roster, "enter", early)


def registers_too_much(patch: pytest.MonkeyPatch) -> None:
    """The page that is being filled counts as full."""
    publish = Roster.publish

    def rounded_up(self: Roster, sequence: Sequence) -> None:
        publish(self, sequence)
        full = sequence.computed // self.page_size
        if self.caching and full < min(len(sequence.chain), len(sequence.pages)) and sequence.computed % self.page_size:
            self.pool.register(sequence.pages[full], sequence.chain[full])

    patch.setattr(Roster, "publish", rounded_up)


def shares_without_reference(patch: pytest.MonkeyPatch) -> None:
    """Cached pages are used, but not pinned."""

    def share(self: BlockPool, pages: list[int]) -> None:
        for page in pages:
            self._references[page] += self._references[page] > 0

    patch.setattr(BlockPool, "share", share)


def evicts_without_forgetting(patch: pytest.MonkeyPatch) -> None:
    """A reused page is still found by its old content."""
    patch.setattr(PrefixCache, "forget", lambda self, page: None)


def forgets_that_token_0_was_answered(patch: pytest.MonkeyPatch) -> None:
    """A preempted PREFILL sequence answers again."""
    preempt = Roster.preempt

    def forgetful(self: Roster, sequence: Sequence) -> None:
        preempt(self, sequence)
        sequence.reported = False

    patch.setattr(Roster, "preempt", forgetful)


def never_withdraws(patch: pytest.MonkeyPatch) -> None:
    """Twins of a cancelled sequence wait for ever."""
    patch.setattr(PendingPages, "withdraw", lambda self, group, digests, owner: None)


def preempts_the_oldest(patch: pytest.MonkeyPatch) -> None:
    """Growth takes pages from anyone, ticketed ones counted in."""

    def oldest(self: Scheduler) -> Sequence:
        candidates = [*self._roster.running.values(), *self._roster.held.values()]
        return min(candidates, key=lambda sequence: sequence.turn)

    patch.setattr(Scheduler, "_last", oldest)


def loses_a_page_when_preempted(patch: pytest.MonkeyPatch) -> None:
    """The last page is not given back."""
    give_back = Roster._give_back

    def leaky(self: Roster, sequence: Sequence) -> None:
        if len(sequence.pages) > 1:
            sequence.pages.pop()
        give_back(self, sequence)

    patch.setattr(Roster, "_give_back", leaky)


def parts_without_a_copy(patch: pytest.MonkeyPatch) -> None:
    """Siblings find undefined content in their own last page."""
    patch.setattr(Postprocessor, "_copy_last_page", lambda self, sequence: None)


def parts_with_a_shared_last_page(patch: pytest.MonkeyPatch) -> None:
    """All samples write into the one page that is not full."""
    part = Roster.part

    def shared(self: Roster, sequence: Sequence) -> list[Sequence]:
        full, rest = divmod(sequence.base, self.page_size)
        last = sequence.pages[full : full + 1] if rest else []
        parted = part(self, sequence)
        for sibling in parted[1:]:
            if last and len(sibling.pages) > full and sibling.pages[full] != last[0]:
                self.pool.release([sibling.pages[full]])
                self.pool.share(last)
                sibling.pages[full] = last[0]
        return parted

    patch.setattr(Roster, "part", shared)


def keeps_a_cancelled_siblings_pages(patch: pytest.MonkeyPatch) -> None:
    """What was set aside for a sample stays so after its cancel."""
    disown = Roster.disown

    def leaky(self: Roster, sequence: Sequence, key: SequenceKey) -> None:
        if key in sequence.siblings:
            sequence.siblings[key] = []
        disown(self, sequence, key)

    patch.setattr(Roster, "disown", leaky)


def takes_void_results(patch: pytest.MonkeyPatch) -> None:
    """What was launched before a preemption counts after it."""
    preempt = Roster.preempt

    def forgetful(self: Roster, sequence: Sequence) -> None:
        preempt(self, sequence)
        sequence.stay -= 1

    patch.setattr(Roster, "preempt", forgetful)


FAULTS: list[Plant] = [
    takes_void_results,
    parts_without_a_copy,
    parts_with_a_shared_last_page,
    keeps_a_cancelled_siblings_pages,
    frees_held_pages,
    registers_early,
    registers_too_much,
    shares_without_reference,
    evicts_without_forgetting,
    forgets_that_token_0_was_answered,
    never_withdraws,
    preempts_the_oldest,
    loses_a_page_when_preempted,
]
CORRUPTING: list[Plant] = [
    parts_without_a_copy,
    parts_with_a_shared_last_page,
    frees_held_pages,
    registers_early,
    registers_too_much,
]


def hunt(walks: int) -> None:
    for seed in range(walks):
        Walk(seed).run(250)


@pytest.mark.parametrize("plant", FAULTS)
def test_planted_faults_are_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, TwostrokeError)):
        hunt(40)


@pytest.mark.parametrize("plant", CORRUPTING)
def test_wrong_content_shows_in_the_output_too(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the integrity check off: the fake runner really notices a page with other content."""
    plant(monkeypatch)
    monkeypatch.setattr(EngineCore, "check_integrity", lambda self, *, idle=False: None)
    with pytest.raises(AssertionError):
        hunt(150)
