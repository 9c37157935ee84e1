"""The prefill side's machine, one story a test; `test_protocol.py` has all the others."""

from collections.abc import Sequence

import pytest

from twostroke.errors import TwostrokeError
from twostroke.kernels.digest import fold_layers
from twostroke.kvtransfer.messages import (
    Accepted,
    ClosePool,
    Complete,
    Copy,
    Drained,
    FirstToken,
    Instruction,
    Progress,
    Release,
    Resend,
    Revoke,
    Send,
    Ticket,
    Ticketed,
)
from twostroke.kvtransfer.writer import MAX_WAITING, Writer

D, POOL, LAYERS, PAGE = 7, 70, 3, 4
TOKEN, LAST = (FirstToken(0, 5, 0),), (FirstToken(0, 5, 1),)
TABLE = [21, 22, 23, 24]


def made(*, up: bool = True) -> Writer:
    writer = Writer(layers=LAYERS, page_size=PAGE)
    if up:
        writer.reader_up(D, 0.0, pool=POOL, pool_pages=100)
    return writer


def ticket(
    number: int = 1, key: str = "a", pages: Sequence[int] = (1, 2, 3), first: int = 0, pool: int = POOL
) -> Ticket:
    return Ticket(number, key, pool, tuple(pages), first, 60.0)


def copies(out: list[Instruction]) -> list[Copy]:
    return [i for i in out if isinstance(i, Copy)]


def said(out: list[Instruction]) -> list[object]:
    return [i.message for i in out if isinstance(i, Send)]


def chunk(writer: Writer, ready: int, total: int, key: str = "a") -> list[Instruction]:
    return [i for layer in range(LAYERS) for i in writer.pages_ready(key, range(layer, layer + 1), TABLE, ready, total)]


def digests(copy: Copy) -> bytes:
    return b"".join(bytes([copy.layer, copy.ordinal + i]) * 4 for i in range(len(copy.src)))


def finish(writer: Writer, out: list[Instruction]) -> list[Instruction]:
    return [i for copy in copies(out) for i in writer.copied(copy.copy, digests(copy))]


def whole(count: int) -> bytes:
    return fold_layers(b"".join(bytes([layer, i]) * 4 for layer in range(LAYERS) for i in range(count)), count)


def completed(writer: Writer, pages: Sequence[int] = (1, 2, 3)) -> list[Instruction]:
    writer.expect("a", D)
    writer.receive(D, ticket(pages=pages), 0.0)
    finish(writer, chunk(writer, 10, 10))
    return writer.prompt_done("a", TOKEN)


def test_each_page_of_each_layer_is_pushed_once_when_it_is_full() -> None:
    writer = made()
    assert writer.expect("a", D) == []
    assert writer.receive(D, ticket(), 0.0) == [Send(D, Progress(((1, 0, 0),))), Ticketed("a")]
    pushed = []
    for ready in (3, 4, 9, 10):
        out = chunk(writer, ready, 10)
        pushed += [(ready, c.layer, c.ordinal, c.src, c.dst) for c in copies(out)]
        assert finish(writer, out) == []
    assert pushed == [
        (ready, layer, ordinal, (21 + ordinal,), (1 + ordinal,))
        for ready, ordinal in ((4, 0), (9, 1), (10, 2))
        for layer in range(LAYERS)
    ]
    assert writer.prompt_done("a", TOKEN) == [Send(D, Complete(1, TOKEN, whole(3)))]
    assert writer.receive(D, Accepted(1), 0.0) == [Release("a")]
    writer.check(idle=True)


def test_a_late_ticket_gets_all_at_once_in_one_copy_a_layer() -> None:
    writer = made()
    writer.expect("a", D)
    chunk(writer, 10, 10)
    assert writer.prompt_done("a", TOKEN) == []
    out = writer.receive(D, ticket(pages=(9, 5), first=4), 0.0)
    assert [(c.layer, c.ordinal, c.src, c.dst) for c in copies(out)] == [
        (layer, 0, (22, 23), (9, 5)) for layer in range(LAYERS)
    ]
    assert said(finish(writer, out)) == [Complete(1, TOKEN, whole(2))]


def test_complete_waits_for_the_last_copy_and_is_repeated_until_answered() -> None:
    writer = made()
    writer.expect("a", D)
    writer.receive(D, ticket(), 0.0)
    out = chunk(writer, 10, 10)
    assert writer.prompt_done("a", TOKEN) == []
    *most, final = copies(out)
    for copy in reversed(most):
        assert writer.copied(copy.copy, digests(copy)) == []
    complete = Send(D, Complete(1, TOKEN, whole(3)))
    assert writer.copied(final.copy, digests(final)) == [complete]
    assert writer.tick(0.5) == []
    assert writer.tick(1.1) == [complete]
    assert writer.reader_down(D, 1.2) == []
    assert writer.tick(9.0) == []
    assert writer.reader_up(D, 9.1, pool=POOL) == [complete]
    assert said(writer.receive(D, ticket(), 9.2)) == [complete.message]
    assert writer.receive(D, Accepted(1), 9.3) == [Release("a")]
    assert writer.receive(D, Accepted(1), 9.4) == []


def test_progress_names_what_the_host_saw_in_one_message_a_step() -> None:
    writer = made()
    for number, key in enumerate("ab", 1):
        writer.expect(key, D)
        writer.receive(D, ticket(number, key, pages=(number * 10, number * 10 + 1, number * 10 + 2)), 0.0)
        out = chunk(writer, 9, 10, key)
        if key == "a":
            finish(writer, out)
        else:  # page by page, and only in the first two layers
            finish(writer, copies(out)[:2])
    assert writer.step_ended() == [Send(D, Progress(((1, 3, 2), (2, 2, 2))))]
    assert writer.step_ended() == []


def test_a_ticket_waits_for_its_request() -> None:
    writer = made()
    assert said(writer.receive(D, ticket(), 0.0)) == [Progress(((1, 0, 0),))]
    assert writer.expect("a", D) == [Ticketed("a")]
    assert said(writer.receive(D, ticket(2, "b", [4]), 0.0)) == [Progress(((2, 0, 0),))]
    assert writer.receive(D, Revoke(2), 1.0) == [Send(D, Drained(2))]
    assert writer.expect("b", D) == []
    writer.receive(D, ticket(3, "c", [4]), 0.0)
    assert said(writer.tick(61.0))[-1] == Drained(3, "the ticket expired")


def test_waiting_tickets_are_bounded() -> None:
    writer = made()
    for number in range(1, MAX_WAITING + 1):
        assert not isinstance(said(writer.receive(D, ticket(number, str(number)), 0.0))[0], Drained)
    assert isinstance(said(writer.receive(D, ticket(MAX_WAITING + 1, "more"), 0.0))[0], Drained)


@pytest.mark.parametrize(
    "bad",
    [
        ticket(pool=71),
        ticket(pages=(0, 1, 2)),
        ticket(pages=(1, 2, 100)),
        ticket(pages=(1, 2, 1)),
        ticket(first=2),
        ticket(first=-4),
        Ticket(1, "a", POOL, (1, 2, 3), 0, 0.0),
    ],
)
def test_a_bad_ticket_is_drained_with_a_reason_and_never_taken(bad: Ticket) -> None:
    writer = made()
    writer.expect("a", D)
    (drained,) = said(writer.receive(D, bad, 0.0))
    assert isinstance(drained, Drained)
    assert drained.ticket == 1
    assert drained.reason
    assert said(writer.receive(D, ticket(), 0.0)) == [Drained(1)]
    assert copies(chunk(writer, 10, 10)) == []


def test_a_ticket_of_a_reader_never_met_is_not_taken_later_either() -> None:
    writer = made(up=False)
    writer.expect("a", D)
    assert writer.receive(D, ticket(), 0.0) == []
    writer.reader_up(D, 0.0)
    assert said(writer.receive(D, ticket(), 0.0)) == [Drained(1)]


@pytest.mark.parametrize("pages", [(), (1, 2), (1, 2, 3, 4)])
def test_a_wrong_number_of_pages_is_never_written(pages: tuple[int, ...]) -> None:
    early, late = made(), made()
    early.expect("a", D)
    early.receive(D, ticket(pages=pages), 0.0)
    out = chunk(early, 10, 10)
    late.expect("a", D)
    chunk(late, 10, 10)
    out += late.receive(D, ticket(pages=pages), 0.0)
    assert copies(out) == []
    assert [m.ticket for m in said(out) if isinstance(m, Drained) and m.reason] == [1, 1]
    for writer in (early, late):
        assert writer.prompt_done("a", TOKEN) == [Release("a")]
        writer.check(idle=True)


def test_a_ticket_without_pages_completes_with_the_prompt() -> None:
    writer = made()
    writer.expect("a", D)
    writer.receive(D, ticket(pages=(), first=8), 0.0)
    chunk(writer, 8, 8)
    assert writer.prompt_done("a", TOKEN) == [Send(D, Complete(1, TOKEN, b""))]


def test_a_revoke_before_its_ticket_refuses_it_for_ever() -> None:
    writer = made()
    writer.expect("a", D)
    assert writer.receive(D, Revoke(1), 0.0) == [Send(D, Drained(1))]
    assert writer.receive(D, ticket(), 0.0) == [Send(D, Drained(1))]
    assert copies(chunk(writer, 10, 10)) == []


@pytest.mark.parametrize("end", ["revoke", "gone", "expiry"])
def test_drained_comes_after_the_last_copy(end: str) -> None:
    writer = made()
    writer.expect("a", D)
    writer.receive(D, ticket(), 0.0)
    out = copies(chunk(writer, 5, 10))
    if end == "revoke":
        assert writer.receive(D, Revoke(1), 0.0) == writer.receive(D, Revoke(1), 0.0) == []
    elif end == "gone":
        assert writer.request_gone("a") == []
    else:
        assert writer.tick(60.0) == []
    assert copies(chunk(writer, 10, 10)) == []
    assert finish(writer, out[1:]) == []
    (drained,) = said(writer.copied(out[0].copy, digests(out[0])))
    assert isinstance(drained, Drained)
    assert writer.prompt_done("a", TOKEN) == ([] if end == "gone" else [Release("a")])
    writer.check(idle=True)


def test_a_request_that_is_gone_drains_its_tickets_now_and_later() -> None:
    writer = made()
    completed(writer)
    assert writer.request_gone("a") == [Send(D, Drained(1, "the request is gone"))]
    assert writer.receive(D, ticket(2), 0.0) == [Send(D, Drained(2, "the request is gone"))]
    writer.expect("a", D)
    assert said(writer.receive(D, ticket(3), 0.0)) == [Progress(((3, 0, 0),))]


def test_a_second_ticket_of_a_sequence_is_refused() -> None:
    writer = made()
    writer.expect("a", D)
    writer.receive(D, ticket(1), 0.0)
    assert isinstance(said(writer.receive(D, ticket(2), 0.0))[-1], Drained)
    writer.reader_up(8, 0.0)
    assert isinstance(said(writer.receive(8, ticket(1), 0.0))[-1], Drained)
    assert len(copies(chunk(writer, 10, 10))) == LAYERS


def test_resend_pushes_those_pages_of_all_layers_once() -> None:
    writer = made()
    completed(writer)
    out = writer.receive(D, Resend(1, (2, 0), 0), 0.0)
    expected = [(layer, ordinal) for layer in range(LAYERS) for ordinal in (0, 2)]
    assert [(c.layer, c.ordinal) for c in copies(out)] == expected
    assert writer.receive(D, Resend(1, (2, 0), 0), 0.0) == []  # said twice
    assert said(finish(writer, out)) == [Complete(1, TOKEN, whole(3), 1)]
    assert writer.receive(D, Resend(1, (0,), 0), 0.0) == []  # of before
    (drained, release) = writer.receive(D, Resend(1, (0,), 1), 0.0)
    assert isinstance(drained, Send)
    assert isinstance(drained.message, Drained)
    assert release == Release("a")
    assert writer.receive(D, Resend(1, (0,), 1), 0.0) == [Send(D, Drained(1))]


@pytest.mark.parametrize("ordinals", [(), (3,), (-1,)])
def test_a_resend_of_pages_out_of_range_drains(ordinals: tuple[int, ...]) -> None:
    writer = made()
    completed(writer)
    out = writer.receive(D, Resend(1, ordinals), 0.0)
    assert copies(out) == []
    assert isinstance(said(out)[0], Drained)


def test_a_finish_with_token_0_needs_no_pages() -> None:
    writer = made()
    writer.expect("a", D)
    chunk(writer, 10, 10)
    writer.prompt_done("a", LAST)
    out = writer.receive(D, ticket(), 0.0)
    assert copies(out) == []
    assert said(out)[-1] == Complete(1, LAST, b"")
    assert writer.receive(D, Accepted(1), 0.0) == [Release("a")]


def test_a_dead_readers_pool_is_closed_after_its_last_copy() -> None:
    writer = made()
    writer.expect("a", D)
    writer.expect("b", D)
    writer.receive(D, ticket(), 0.0)
    writer.receive(D, ticket(2, "c", [9]), 0.0)
    out = chunk(writer, 10, 10)
    writer.prompt_done("a", TOKEN)
    assert writer.reader_dead(D) == writer.reader_dead(D) == []
    assert writer.reader_up(D, 0.0) == [], "its last copy is not done"
    *most, final = copies(out)
    assert finish(writer, most) == []
    assert writer.copied(final.copy, digests(final)) == [Release("a"), ClosePool(D)]
    assert writer.receive(D, ticket(3, "d"), 0.0) == writer.reader_dead(D) == []
    assert writer.reader_up(D, 0.0) == [ClosePool(D)], "whoever opened its pool again must close it again"
    assert writer.prompt_done("b", TOKEN) == [Release("b")]
    assert writer.expect("e", D) == []
    assert writer.prompt_done("e", TOKEN) == [Release("e")]
    writer.check(idle=True)


def test_a_recomputed_sequence_starts_over() -> None:
    writer = made()
    writer.expect("a", D)
    chunk(writer, 10, 10)
    writer.prompt_done("a", TOKEN)
    assert writer.restarted("a") == []
    assert copies(writer.receive(D, ticket(), 0.0)) == []
    moved = [31, 32, 33]
    out = [i for layer in range(LAYERS) for i in writer.pages_ready("a", range(layer, layer + 1), moved, 4, 10)]
    assert [c.src for c in copies(out)] == [(31,)] * LAYERS
    assert finish(writer, out) == []
    out = [i for layer in range(LAYERS) for i in writer.pages_ready("a", range(layer, layer + 1), moved, 10, 10)]
    assert said(finish(writer, out)) == [Complete(1, TOKEN, whole(3))]


def test_pages_that_move_under_a_ticket_end_it() -> None:
    writer = made()
    writer.expect("a", D)
    writer.receive(D, ticket(), 0.0)
    finish(writer, chunk(writer, 4, 10))
    out = writer.pages_ready("a", range(1), [31, 32, 33], 4, 10)
    assert copies(out) == []
    assert isinstance(said(out)[0], Drained)


def test_unknown_names_are_harmless_and_impossible_numbers_are_not() -> None:
    writer = made()
    assert writer.copied(99, b"") == writer.request_gone("x") == writer.prompt_done("x", TOKEN) == []
    assert writer.pages_ready("x", range(1), [], 0, 4) == writer.restarted("x") == []
    assert writer.receive(D, Accepted(4), 0.0) == writer.reader_down(99, 0.0) == []
    writer.expect("a", D)
    with pytest.raises(ValueError, match="pages"):
        writer.pages_ready("a", range(1), [1], 4, 10)
    with pytest.raises(TwostrokeError, match="1 sequences"):
        writer.check(idle=True)
