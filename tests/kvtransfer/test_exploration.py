"""The ticket protocol on small instances, explored whole: every order of every event, with the real machines.

Two requests, two tickets, three pages a side, one crash or freeze a side (see `small_world` on freezes), links that
break, lose and delay, cancels, expiry, preemption, damaged pages. In every state: no page has two owners, none is
written outside of its ticket, none is read before it is whole, none given out while a live writer may write it; and
from every state all can still end, with all pages home and no ticket open, and with the KV unless something justifies
its loss.
"""

import time

import pytest

from . import faults
from .explorer import Explorer, Found
from .faults import Fault
from .small_parts import Instance, SmallJob
from .small_state import CRASH_P
from .world_parts import Violation

ONE, TWO, SHORT = (SmallJob(),), (SmallJob(), SmallJob()), (SmallJob((1,)), SmallJob((1,)))

QUICK: dict[str, Instance] = {
    "links break": Instance(TWO, breaks=1),
    "messages come late and again": Instance(ONE, breaks=1, late=2, cancels=1),
    "a page is damaged twice": Instance(TWO, corrupt=2),
    "a client cancels": Instance(TWO, cancels=1, progress=False),
    "a ticket expires": Instance(ONE, expiries=1, cancels=1, breaks=1, progress=False),
    "pages are taken from a sequence": Instance(TWO, preempts=1, breaks=1),
    "the prefill worker ends": Instance(TWO, crash_prefill=1),
    "either worker ends": Instance(ONE, crash_prefill=1, crash_decode=1, progress=False),
    "digests come late": Instance(ONE, late_verify=True, cancels=1, corrupt=1),
    "two layers": Instance(ONE, layers=2, corrupt=1, cancels=1),
    "pages fill by and by": Instance((SmallJob((1, 2, 3)),), page_size=2, cancels=1, corrupt=1),
    "a prefix is cached": Instance((SmallJob(first_page=1), SmallJob((1,), first_page=1)), breaks=1),
    "a lane overtakes its link": Instance(TWO, cancels=1, breaks=1, lane=True, progress=False),
    "a lane overtakes a resend": Instance(ONE, breaks=1, corrupt=2, lane=True),
    "token 0 is the last": Instance((SmallJob(finish=1), SmallJob((1,))), corrupt=1),
}

FULL: dict[str, Instance] = {
    "either worker ends, two requests": Instance(TWO, crash_prefill=1, crash_decode=1),
    "either worker ends, links break": Instance(TWO, crash_prefill=1, crash_decode=1, breaks=1, progress=False),
    "the prefill worker ends, a client cancels": Instance(TWO, crash_prefill=1, cancels=1, progress=False),
    "the decode worker ends, a client cancels": Instance(TWO, crash_decode=1, cancels=1, progress=False),
    "clients cancel, a link breaks": Instance(TWO, cancels=1, breaks=1, late=1, progress=False),
    "tickets expire, a link breaks": Instance(TWO, expiries=1, breaks=1, progress=False),
    "clients cancel both": Instance(TWO, cancels=2),
    "all of it at once": Instance(
        SHORT[:1], cancels=1, breaks=1, corrupt=1, crash_prefill=1, crash_decode=1, expiries=1
    ),
    "a lane overtakes whatever happens": Instance(
        ONE, cancels=1, breaks=1, corrupt=1, crash_prefill=1, expiries=1, lane=True
    ),
    "two layers, two requests": Instance(TWO, layers=2, corrupt=1, breaks=1, progress=False),
    "late digests, a link breaks": Instance(TWO, late_verify=True, corrupt=1, breaks=1),
    "a prefix is cached, a client cancels": Instance(
        (SmallJob(first_page=1), SmallJob((1,), first_page=1)), cancels=1, breaks=1, progress=False
    ),
}


def explored(name: str, instance: Instance, capsys: pytest.CaptureFixture[str]) -> Found:
    """All of an instance; says how much that was."""
    start = time.process_time()
    found = Explorer(instance).explore()
    with capsys.disabled():
        print(
            f"\n{name}: {found.states} states, {found.edges} steps between them, {found.ends} of them ends of "
            f"{len(found.results)} kinds, {time.process_time() - start:.1f} s"
        )
    return found


@pytest.mark.parametrize("name", QUICK)
def test_every_order_of_events(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    explored(name, QUICK[name], capsys)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FULL)
def test_every_order_of_more_events(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    explored(name, FULL[name], capsys)


def test_nothing_is_lost_where_only_links_break_and_one_page_is_damaged() -> None:
    found = Explorer(Instance(TWO, breaks=1, corrupt=1, progress=False)).explore()
    assert found.results == {(("arrived", "released"), ("arrived", "released"))}


def test_requests_end_in_every_way() -> None:
    found = Explorer(Instance(SHORT[:1], cancels=1, crash_prefill=1, expiries=1, progress=False)).explore()
    ends = {(on_d, on_p) for on_d in ("arrived", "lost", "gone") for on_p in ("released", "gone")}
    assert {result[0] for result in found.results} == ends


# Planted faults

BREAK, CANCEL, EXPIRY = Instance(ONE, breaks=1), Instance(ONE, cancels=1), Instance(ONE, expiries=1)
CORRUPT, LAYERS = Instance(ONE, corrupt=1), Instance(ONE, layers=2, corrupt=1)
CRASH_D, PREEMPT = Instance(ONE, crash_decode=1), Instance(ONE, preempts=1)
STUCK = "it cannot end any more"
PLANTED: dict[Fault, tuple[Instance, str]] = {  # where it shows, and how
    faults.early_reuse_at_revoke: (CANCEL, "a write into pages that its ticket does not hold"),
    faults.expiry_frees_without_drain: (EXPIRY, "a write into pages that its ticket does not hold"),
    faults.lost_link_taken_for_death: (BREAK, "a write into pages that its ticket does not hold"),
    faults.digests_skipped: (CORRUPT, "wrong KV would be read"),
    faults.digest_of_one_layer_only: (LAYERS, "wrong KV would be read"),
    faults.accepted_twice_frees_twice: (BREAK, "a hold ended twice"),
    faults.nothing_said_again: (BREAK, STUCK),
    faults.lost_twice: (CANCEL, "lost after gone"),
    faults.drained_before_last_copy: (CANCEL, "released pages under a copy"),
    faults.complete_before_last_copy: (CANCEL, "a write into pages that its ticket does not hold"),
    faults.ticket_taken_after_revoke: (EXPIRY, "a write into pages that its ticket does not hold"),
    faults.partial_page_pushed_early: (QUICK["pages fill by and by"], "wrong KV would be read"),
    faults.page_pushed_to_wrong_ordinal: (Instance(ONE), "a write into other pages"),
    faults.source_pages_shifted: (QUICK["a prefix is cached"], "wrong KV would be read"),
    faults.pool_closed_under_copies: (CRASH_D, "closes a pool under a copy"),
    faults.copies_after_reader_death: (CRASH_D, "a copy for a dead reader"),
    faults.preemption_unnoticed: (PREEMPT, "a copy from pages that nobody owns"),
    faults.released_before_accepted: (CORRUPT, "a copy from pages that nobody owns"),
    faults.resend_of_one_layer_only: (LAYERS, "wrong KV would be read"),
    faults.complete_never_repeated: (BREAK, STUCK),
    faults.old_round_believed: (CORRUPT, "a write into pages that its ticket does not hold"),
    faults.quarantine_forgotten: (CANCEL, "holds and tickets differ"),
    faults.dead_writer_keeps_pages: (Instance(ONE, cancels=1, crash_prefill=1), STUCK),
    faults.pool_of_the_dead_kept: (CRASH_D, STUCK),
    faults.sources_never_released: (Instance(ONE), STUCK),
    faults.mismatch_believed_at_last: (Instance(ONE, corrupt=2), "wrong KV would be read"),
    faults.resend_never_asked_for: (CORRUPT, "nothing happened that justifies a loss"),
}


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    instance, expected = PLANTED[fault]
    fault(monkeypatch)
    with pytest.raises(Violation, match=expected):
        Explorer(instance).explore()


def test_every_fault_is_planted() -> None:
    assert faults.FAULTS.keys() <= PLANTED.keys()


@pytest.mark.parametrize("mixed", [False, True])
def test_a_message_for_an_old_incarnation_would_be_found(mixed: bool) -> None:
    """A prefill worker drains its ticket 1 and dies; the word comes late, when its successor writes under its own."""
    instance = Instance(
        SHORT, pages=1, cancels=1, breaks=1, late=1, crash_prefill=1, progress=False, mix_incarnations=mixed
    )
    before = (("reserve", 0, 0), ("expect", 2, 0), ("cancel", 2, 0, False), ("to_prefill", 0, 2))
    before += (("break", 0, 2, (False, 0)), ("crash", 2, CRASH_P, True))
    if not mixed:
        Explorer(instance).explore(*before)
        return
    with pytest.raises(Violation, match="a write into pages that its ticket does not hold"):
        Explorer(instance).explore(*before)
