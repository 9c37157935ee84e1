"""The decode side's machine, one story a test; `test_protocol.py` has all the others."""

import pytest

from twostroke.errors import TwostrokeError
from twostroke.kernels.digest import fold_layers
from twostroke.kvtransfer.messages import (
    Accepted,
    Arrived,
    Complete,
    Drained,
    FirstToken,
    Instruction,
    Lost,
    Progress,
    Resend,
    Revoke,
    Send,
    Ticket,
    Unhold,
    Verify,
)
from twostroke.kvtransfer.reader import Reader

P, POOL, LAYERS, PAGE = 3, 30, 2, 4
PAGES = (5, 9, 6)
TOKEN, LAST = (FirstToken(0, 8, 0, ((8, -0.5),)),), (FirstToken(0, 8, 2),)
ACCEPT: list[Instruction] = [Send(P, Accepted(1)), Arrived("a", TOKEN), Unhold(P, 1)]


def made(*, up: bool = True, opened: bool = True) -> Reader:
    reader = Reader(layers=LAYERS, page_size=PAGE, pool=POOL)
    if up:
        reader.writer_up(P, 0.0)
    if opened:
        assert reader.open(P, "a", PAGES, 4, 0.0)[0] == 1
    return reader


def own(layer: int, ordinal: int) -> bytes:
    return bytes([layer, ordinal]) * 4


def table(wrong: tuple[tuple[int, int], ...] = ()) -> bytes:
    places = [(layer, i) for layer in range(LAYERS) for i in range(len(PAGES))]
    return b"".join(bytes(8) if place in wrong else own(*place) for place in places)


def folded(wrong: tuple[tuple[int, int], ...] = ()) -> bytes:
    return fold_layers(table(wrong), len(PAGES))


def answer(reader: Reader, out: list[Instruction], bad: bool = False) -> list[Instruction]:
    said: list[Instruction] = []
    for v in [i for i in out if isinstance(i, Verify)]:
        digests = [own(v.first_layer + k, v.ordinal + i) for k in range(v.layers) for i in range(len(v.pages))]
        data = b"\1" * 8 * len(digests) if bad else b"".join(digests)
        said += reader.digested(v.writer, v.ticket, v.first_layer, v.ordinal, data, v.layers, len(v.pages))
    return said


def complete(digests: bytes = folded(), round_: int = 0) -> Complete:
    return Complete(1, TOKEN, digests, round_)


def test_pages_are_digested_as_they_arrive_and_accepted_at_the_end() -> None:
    reader = made(opened=False)
    assert reader.open(P, "a", PAGES, 4, 0.0) == (1, [Send(P, Ticket(1, "a", POOL, PAGES, 4, 60.0))])
    asked = []
    for entry in ((1, 0, 0), (1, 1, 1), (1, 2, 1), (1, 2, 1), (9, 2, 3), (1, 1, 2)):
        out = reader.receive(P, Progress((entry,)), 0.0)
        asked += [(v.first_layer, v.layers, v.ordinal, v.pages) for v in out if isinstance(v, Verify)]
        assert answer(reader, out) == []
    assert asked == [(0, 1, 0, (5,)), (1, 1, 0, (5,)), (0, 1, 1, (9,))]
    out = reader.receive(P, complete(), 0.0)
    assert [(v.first_layer, v.layers, v.ordinal, v.pages) for v in out if isinstance(v, Verify)] == [
        (0, 1, 2, (6,)),
        (1, 1, 1, (9, 6)),
    ]
    assert answer(reader, out) == ACCEPT
    reader.check(idle=True)


def test_layers_of_equal_progress_are_asked_together() -> None:
    reader = made()
    assert reader.receive(P, Progress(((1, 99, 99),)), 0.0) == [Verify(P, 1, 0, LAYERS, 0, PAGES)]


def test_an_answer_that_was_not_asked_for_is_ignored() -> None:
    reader = made()
    assert reader.digested(P, 1, 0, 0, b"", LAYERS, 3) == reader.digested(4, 1, 0, 0, b"", 1, 1) == []
    reader.receive(P, Progress(((1, 2, 3),)), 0.0)
    assert reader.digested(P, 1, 0, 0, b"short", LAYERS, 3) == []
    assert reader.receive(P, complete(), 0.0) == []  # still waits for the answer
    assert reader.digested(P, 1, 0, 0, table(), LAYERS, 3) == ACCEPT


def test_a_repeated_complete_is_answered_without_touching_pages() -> None:
    reader = made()
    answer(reader, reader.receive(P, complete(), 0.0))
    assert reader.receive(P, complete(), 1.0) == [Send(P, Accepted(1))]
    assert reader.receive(P, Complete(2, TOKEN, b""), 1.0) == []  # never given out
    reader.open(P, "b", (1,), 0, 1.0)
    reader.request_gone("b", 1.0)
    reader.receive(P, Drained(2), 1.0)
    assert reader.receive(P, Complete(2, TOKEN, b""), 1.0) == [Send(P, Revoke(2))]


def test_pages_that_do_not_match_are_wanted_once_more() -> None:
    reader = made()
    out = reader.receive(P, complete(folded(wrong=((0, 2), (1, 2), (1, 0)))), 0.0)
    assert answer(reader, out) == [Send(P, Resend(1, (0, 2), 0))]
    assert reader.receive(P, complete(), 0.5) == []  # of before the resend: its pages may be written now
    assert reader.receive(P, Progress(((1, 2, 3),)), 0.5) == []
    assert reader.tick(1.5) == [Send(P, Resend(1, (0, 2), 0))]
    assert reader.writer_up(P, 1.6) == [Send(P, Resend(1, (0, 2), 0))]
    out = reader.receive(P, complete(round_=1), 2.0)
    assert out == [Verify(P, 1, 0, LAYERS, 0, (5,)), Verify(P, 1, 0, LAYERS, 2, (6,))]
    assert answer(reader, out) == ACCEPT


def test_what_does_not_match_twice_is_lost() -> None:
    reader = made()
    answer(reader, reader.receive(P, complete(), 0.0), bad=True)
    out = answer(reader, reader.receive(P, complete(round_=1), 0.0), bad=True)
    assert out == [Lost("a", "the digests of 3 pages did not match"), Send(P, Revoke(1)), Unhold(P, 1)]
    reader.check(idle=True)


def test_digests_of_another_length_do_not_match() -> None:
    reader = made()
    assert answer(reader, reader.receive(P, complete(folded()[:-8]), 0.0)) == [Send(P, Resend(1, (2,), 0))]


def test_a_ticket_without_pages_is_accepted_at_once() -> None:
    reader = made(opened=False)
    reader.open(P, "a", (), 8, 0.0)
    assert reader.receive(P, Complete(1, TOKEN, b""), 0.0) == ACCEPT


def test_a_finish_with_token_0_is_accepted_unverified() -> None:
    reader = made()
    out = reader.receive(P, Complete(1, LAST, b""), 0.0)
    assert out == [Send(P, Accepted(1)), Arrived("a", LAST, verified=False), Unhold(P, 1)]


def test_a_complete_without_token_0_is_refused() -> None:
    reader = made()
    out = reader.receive(P, Complete(1, (), b""), 0.0)
    assert out == [Lost("a", "the hand-over lacks token 0"), Send(P, Revoke(1)), Unhold(P, 1)]


@pytest.mark.parametrize("end", ["drained", "complete", "dead"])
@pytest.mark.parametrize("why", ["cancel", "expiry"])
def test_pages_stay_held_until_the_writer_cannot_write(why: str, end: str) -> None:
    reader = made()
    if why == "cancel":
        assert reader.request_gone("a", 1.0) == [Send(P, Revoke(1))]
    else:
        assert reader.tick(60.0) == [Lost("a", "the KV did not arrive in time"), Send(P, Revoke(1))]
    assert reader.writer_down(P, 61.0) == reader.tick(70.0) == []
    assert reader.open_tickets() == 1
    assert reader.writer_up(P, 71.0) == [Send(P, Revoke(1))]
    assert reader.tick(71.5) == []
    assert reader.tick(72.5) == [Send(P, Revoke(1))]
    assert reader.receive(P, Progress(((1, 2, 3),)), 73.0) == []
    if end == "drained":
        assert reader.receive(P, Drained(1), 73.0) == [Unhold(P, 1)]
        assert reader.receive(P, Drained(1), 73.0) == []
    elif end == "complete":
        assert reader.receive(P, complete(), 73.0) == [Send(P, Revoke(1)), Unhold(P, 1)]
    else:
        assert reader.writer_dead(P) == [Unhold(P, 1)]
        assert reader.writer_dead(P) == []
    assert reader.request_gone("a", 74.0) == []
    reader.check(idle=True)


def test_a_ticket_is_repeated_until_the_writer_shows_that_it_has_it() -> None:
    reader = made(up=False)
    assert reader.tick(2.0) == []
    again = Ticket(1, "a", POOL, PAGES, 4, 58.0)
    assert reader.writer_up(P, 2.0) == [Send(P, again)]
    assert len(reader.tick(3.5)) == 1
    reader.receive(P, Progress(((1, 0, 0),)), 3.6)
    assert reader.tick(5.0) == []


def test_drained_unasked_is_a_loss() -> None:
    reader = made()
    assert reader.receive(P, Drained(1, "no"), 0.0) == [Lost("a", "no"), Unhold(P, 1)]


def test_what_a_dead_writer_completed_counts() -> None:
    reader = made()
    out = reader.receive(P, complete(), 0.0)
    assert reader.writer_dead(P) == []
    assert answer(reader, out) == [Arrived("a", TOKEN), Unhold(P, 1)]
    assert reader.receive(P, complete(), 0.0) == reader.writer_up(P, 0.0) == []
    reader.check(idle=True)


def test_a_dead_writer_gets_no_second_try() -> None:
    reader = made()
    out = reader.receive(P, complete(), 0.0)
    reader.writer_dead(P)
    assert answer(reader, out, bad=True) == [Lost("a", "the digests of 3 pages did not match"), Unhold(P, 1)]


def test_a_ticket_for_a_dead_writer_is_lost_at_once() -> None:
    reader = made()
    gone = "the prefill worker is gone"
    assert reader.writer_dead(P) == [Lost("a", gone), Unhold(P, 1)]
    assert reader.open(P, "b", (1,), 0, 1.0) == (1, [Lost("b", gone), Unhold(P, 1)])
    reader.check(idle=True)


def test_a_request_gone_while_verifying_frees_at_once() -> None:
    reader = made()
    out = reader.receive(P, complete(), 0.0)
    assert reader.request_gone("a", 0.0) == [Send(P, Revoke(1)), Unhold(P, 1)]
    assert answer(reader, out) == []


def test_a_sequence_has_one_ticket_at_a_time() -> None:
    reader = made()
    with pytest.raises(ValueError, match="second ticket"):
        reader.open(P, "a", (1,), 0, 0.0)
    with pytest.raises(ValueError, match="within a page"):
        reader.open(P, "b", (1,), 3, 0.0)
    with pytest.raises(TwostrokeError, match="1 tickets are left"):
        reader.check(idle=True)
    assert reader.receive(99, complete(), 0.0) == reader.writer_down(99, 0.0) == []


def test_when_the_rest_comes_soon() -> None:
    reader = Reader(layers=32, page_size=4, pool=POOL)
    reader.writer_up(P, 0.0)
    reader.open(P, "a", PAGES, 4, 0.0)
    assert not reader.nearly_there(P, 1, 27, len(PAGES))
    assert reader.nearly_there(P, 1, 28, len(PAGES))
    assert not reader.nearly_there(P, 1, 32, len(PAGES) - 1)  # another chunk follows
    assert not reader.nearly_there(P, 2, 32, len(PAGES))  # of another time
    assert not reader.nearly_there(P + 1, 1, 32, len(PAGES))
    reader.request_gone("a", 0.0)
    assert not reader.nearly_there(P, 1, 32, len(PAGES))  # nobody waits
