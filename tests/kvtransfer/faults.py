"""Faults planted into the machines, each a mistake that was or could be made; the world must catch every one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from twostroke.kvtransfer import arrival, push
from twostroke.kvtransfer.arrival import Arrival, ArrivalState
from twostroke.kvtransfer.ids import SeenIds
from twostroke.kvtransfer.messages import ClosePool, Complete, Instruction, Lost, Release, Resend, Unhold
from twostroke.kvtransfer.push import Push
from twostroke.kvtransfer.pushes import Pushes
from twostroke.kvtransfer.reader import Reader
from twostroke.kvtransfer.source import Source
from twostroke.kvtransfer.writer import Writer

Out = list[Instruction]
Fault = Callable[[pytest.MonkeyPatch], None]


def early_reuse_at_revoke(patch: pytest.MonkeyPatch) -> None:
    """Pages of a cancelled request are free before their writer has drained the ticket."""
    original = Reader._give_up

    def give_up(self: Reader, arrival: Arrival, now: float) -> Out:
        verifying = arrival.state is ArrivalState.VERIFYING
        return original(self, arrival, now) + ([] if verifying else self._close(arrival))

    patch.setattr(Reader, "_give_up", give_up)


def expiry_frees_without_drain(patch: pytest.MonkeyPatch) -> None:
    """A time-out frees pages that someone may still write."""
    original = Reader.tick

    def tick(self: Reader, now: float) -> Out:
        late = [a for peer in self._peers.values() for a in peer.arrivals.values() if now >= a.deadline]
        late = [a for a in late if a.state is ArrivalState.OPEN]
        return [i for a in late for i in (*self._lose(a, "late"), *self._close(a))] + original(self, now)

    patch.setattr(Reader, "tick", tick)


def lost_link_taken_for_death(patch: pytest.MonkeyPatch) -> None:
    """Pages are freed because the link to their writer broke."""
    original = Reader.writer_down

    def writer_down(self: Reader, writer: int, now: float) -> Out:
        arrivals = list(self._peers[writer].arrivals.values()) if writer in self._peers else []
        return original(self, writer, now) + [i for a in arrivals for i in self._writes_ended(a, "down")]

    patch.setattr(Reader, "writer_down", writer_down)


def digests_skipped(patch: pytest.MonkeyPatch) -> None:
    """Complete is believed without a look at the pages."""

    def verify(self: Reader, arrival: Arrival, message: Complete) -> Out:
        return self._accept(arrival, message, verified=True)

    patch.setattr(Reader, "_verify", verify)


def digest_of_one_layer_only(patch: pytest.MonkeyPatch) -> None:
    """Of each page only one layer is told and compared."""
    for module in (arrival, push):
        patch.setattr(module, "fold_layers", lambda digests, pages: digests[: 8 * pages])


def accepted_twice_frees_twice(patch: pytest.MonkeyPatch) -> None:
    """A repeated complete ends the hold once more."""
    original = Reader._complete_again

    def complete_again(self: Reader, writer: int, peer: Any, ticket: int) -> Out:
        return [*original(self, writer, peer, ticket), Unhold(writer, ticket)]

    patch.setattr(Reader, "_complete_again", complete_again)


def old_round_believed(patch: pytest.MonkeyPatch) -> None:
    """A complete from before the resend is taken for the one after it."""
    original = Reader._complete

    def complete(self: Reader, writer: int, peer: Any, message: Complete) -> Out:
        arrival = peer.arrivals.get(message.ticket)
        return original(self, writer, peer, replace(message, round=arrival.round) if arrival else message)

    patch.setattr(Reader, "_complete", complete)


def nothing_said_again(patch: pytest.MonkeyPatch) -> None:
    """What a broken link swallowed, a decode worker never says again."""
    up, tick = Reader.writer_up, Reader.tick
    patch.setattr(Reader, "writer_up", lambda self, writer, now: up(self, writer, now) and [])
    patch.setattr(Reader, "tick", lambda self, now: [i for i in tick(self, now) if isinstance(i, Lost | Unhold)])


def lost_twice(patch: pytest.MonkeyPatch) -> None:
    """A ticket that was given up is reported again when its writer ends it."""
    original = Reader._writes_ended

    def writes_ended(self: Reader, arrival: Arrival, reason: str) -> Out:
        again: Out = [Lost(arrival.key, reason)] if arrival.state is ArrivalState.REVOKING else []
        return again + original(self, arrival, reason)

    patch.setattr(Reader, "_writes_ended", writes_ended)


def drained_before_last_copy(patch: pytest.MonkeyPatch) -> None:
    """Drained is said at once, whatever is under way."""

    def stop(self: Pushes, push: Push, reason: str) -> Out:
        for copy in push.outstanding:
            del self.copies[copy]
        return self.drain(push)

    patch.setattr(Pushes, "stop", stop)


def complete_before_last_copy(patch: pytest.MonkeyPatch) -> None:
    """Complete is said when the last copy was launched, not when it was seen completed."""
    original = Pushes.launch

    def launch(self: Pushes, source: Source, push: Push, layers: Any) -> Out:
        out = original(self, source, push, layers)
        done = source.first is not None and push.all_launched()
        return [*out, *(self.say_complete(push) if done else [])]

    patch.setattr(Pushes, "launch", launch)


def ticket_taken_after_revoke(patch: pytest.MonkeyPatch) -> None:
    """A ticket that comes after its own end is served."""
    patch.setattr(SeenIds, "fresh", lambda self, number: True)


def partial_page_pushed_early(patch: pytest.MonkeyPatch) -> None:
    """The last page is pushed when its first token is written."""
    patch.setattr(Source, "whole_pages", lambda self, layer: -(-self._ready[layer] // self._page_size))


def page_pushed_to_wrong_ordinal(patch: pytest.MonkeyPatch) -> None:
    """Pages of one copy go to each other's places."""
    original = Push.launch

    def launch(self: Push, *args: Any) -> Any:
        copy = original(self, *args)
        self.outstanding[copy.copy] = replace(copy, dst=copy.dst[::-1])
        return self.outstanding[copy.copy]

    patch.setattr(Push, "launch", launch)


def source_pages_shifted(patch: pytest.MonkeyPatch) -> None:
    """The prompt is pushed from its start, whatever the decode worker has already."""
    original = Push.launch

    def launch(self: Push, copy: int, layer: int, ordinals: range, prompt_pages: tuple[int, ...]) -> Any:
        right = original(self, copy, layer, ordinals, prompt_pages)
        self.outstanding[copy] = replace(right, src=prompt_pages[ordinals.start : ordinals.stop])
        return self.outstanding[copy]

    patch.setattr(Push, "launch", launch)


def pool_closed_under_copies(patch: pytest.MonkeyPatch) -> None:
    """A dead reader's pool is unmapped while launched copies still write."""
    original = Writer.reader_dead

    def reader_dead(self: Writer, reader: int) -> Out:
        out = original(self, reader)
        return [ClosePool(reader), *[i for i in out if not isinstance(i, ClosePool)]]

    patch.setattr(Writer, "reader_dead", reader_dead)


def copies_after_reader_death(patch: pytest.MonkeyPatch) -> None:
    """Pushes to a dead reader go on."""
    patch.setattr(Writer, "reader_dead", lambda self, reader: self.reader_down(reader, 0.0))


def preemption_unnoticed(patch: pytest.MonkeyPatch) -> None:
    """A ticket is served from pages that were taken from the sequence."""
    patch.setattr(Writer, "restarted", lambda self, key: [])


def released_before_accepted(patch: pytest.MonkeyPatch) -> None:
    """The source pages are given away with complete, though they may have to be pushed again."""
    say, abandon = Pushes.say_complete, Pushes.abandon

    def say_complete(self: Pushes, push: Push) -> Out:
        first = push.repeat_at == 0.0
        return [*say(self, push), *([Release(push.ticket.key)] if first else [])]

    patch.setattr(Pushes, "say_complete", say_complete)

    def abandon_later(self: Pushes, source: Source) -> Out:
        said = source.push is not None and source.push.repeat_at > 0.0
        out = abandon(self, source)
        return [] if said else out

    patch.setattr(Pushes, "abandon", abandon_later)


def resend_of_one_layer_only(patch: pytest.MonkeyPatch) -> None:
    """A resend repeats the first layer; what was wrong in another one is then accepted unseen."""
    original = Pushes.resend

    def resend(self: Pushes, source: Source, push: Push, message: Resend) -> Out:
        layers, self.layers = self.layers, 1
        out = original(self, source, push, message)
        self.layers = layers
        return out

    patch.setattr(Pushes, "resend", resend)
    for module in (arrival, push):
        patch.setattr(module, "fold_layers", lambda digests, pages: digests[: 8 * pages])


def complete_never_repeated(patch: pytest.MonkeyPatch) -> None:
    """A complete that its link swallowed is not said again, nor does its ticket expire."""
    original = Pushes.say_complete

    def say_complete(self: Pushes, push: Push) -> Out:
        first, push.deadline = push.repeat_at == 0.0, float("inf")
        out = original(self, push)
        return out if first else []

    patch.setattr(Pushes, "say_complete", say_complete)
    patch.setattr(Reader, "tick", lambda self, now: [])


def quarantine_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Pages of a revoked ticket never come back, though their writer said that it is drained."""
    original = Reader._close

    def close(self: Reader, arrival: Arrival) -> Out:
        revoked = arrival.state is ArrivalState.REVOKING
        return [i for i in original(self, arrival) if not (revoked and isinstance(i, Unhold))]

    patch.setattr(Reader, "_close", close)


def dead_writer_keeps_pages(patch: pytest.MonkeyPatch) -> None:
    """A revoked ticket outlives its writer's proven death."""
    original = Reader._writes_ended

    def writes_ended(self: Reader, arrival: Arrival, reason: str) -> Out:
        gone = arrival.state is ArrivalState.REVOKING and "gone" in reason
        return [] if gone else original(self, arrival, reason)

    patch.setattr(Reader, "_writes_ended", writes_ended)


def pool_of_the_dead_kept(patch: pytest.MonkeyPatch) -> None:
    """A dead reader's pool stays open, so that its successor finds no room."""
    original = Pushes.close_pool

    def close_pool(self: Pushes, reader: int) -> Out:
        return [i for i in original(self, reader) if not isinstance(i, ClosePool)]

    patch.setattr(Pushes, "close_pool", close_pool)


def sources_never_released(patch: pytest.MonkeyPatch) -> None:
    """A prefill worker keeps the pages of a sequence whose ticket was accepted."""
    original = Pushes.abandon

    def abandon(self: Pushes, source: Source) -> Out:
        return [i for i in original(self, source) if not isinstance(i, Release)]

    patch.setattr(Pushes, "abandon", abandon)


def mismatch_believed_at_last(patch: pytest.MonkeyPatch) -> None:
    """What did not match twice is believed."""
    original = Reader._refuse

    def refuse(self: Reader, arrival: Arrival, reason: str) -> Out:
        message = arrival.complete
        return original(self, arrival, reason) if message is None else self._accept(arrival, message, verified=True)

    patch.setattr(Reader, "_refuse", refuse)


def resend_never_asked_for(patch: pytest.MonkeyPatch) -> None:
    """One damaged page costs the request, though its source is still there."""
    original = Reader._judge

    def judge(self: Reader, arrival: Arrival) -> Out:
        arrival.drained = True
        return original(self, arrival)

    patch.setattr(Reader, "_judge", judge)


FAULTS: dict[Fault, str] = {  # and what it leads to
    quarantine_forgotten: "holds and tickets differ",
    dead_writer_keeps_pages: "holds and tickets differ|for ever|pages are lost|tickets are left",
    pool_of_the_dead_kept: "a dead pool is still mapped",
    early_reuse_at_revoke: "a write into pages that its ticket does not hold|a hold ended under a copy",
    expiry_frees_without_drain: "a write into pages that its ticket does not hold|a hold ended under a copy",
    lost_link_taken_for_death: "a write into pages that its ticket does not hold|a hold ended under a copy",
    digests_skipped: "wrong KV would be read",
    digest_of_one_layer_only: "wrong KV would be read",
    accepted_twice_frees_twice: "a hold ended twice",
    nothing_said_again: "pages are lost on D|for ever",
    lost_twice: "lost after",
    drained_before_last_copy: "under a copy",
    complete_before_last_copy: "a hold ended under a copy",
    ticket_taken_after_revoke: "a write into pages that its ticket does not hold|a hold ended under a copy",
    partial_page_pushed_early: "wrong KV would be read",
    page_pushed_to_wrong_ordinal: "a write into other pages",
    source_pages_shifted: "wrong KV would be read",
    pool_closed_under_copies: "closes a pool under a copy",
    copies_after_reader_death: "a dead pool is still mapped|a copy for a dead reader",
    preemption_unnoticed: "a copy from pages that nobody owns|wrong KV would be read",
    released_before_accepted: "a copy from pages that nobody owns|released pages under a copy",
    resend_of_one_layer_only: "wrong KV would be read",
    complete_never_repeated: "for ever",
}
