"""Two streams into one: every index once, in order, whatever is repeated, late, early or lost."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from twostroke.engine.request import FinishReason, Token
from twostroke.services.gateway.merge import Merger


def tokens(*ids: int) -> list[Token]:
    return [Token(id_) for id_ in ids]


def test_whichever_copy_of_token_0_comes_first() -> None:
    merger = Merger(10)
    assert merger.accept(0, tokens(5), None) == tokens(5)
    assert merger.accept(0, tokens(5, 6), None) == tokens(6)
    assert merger.accept(0, tokens(5), None) == []
    assert merger.next_index == 2
    assert merger.finish is None


def test_a_token_beyond_a_gap_waits_for_it() -> None:
    merger = Merger(10)
    assert merger.accept(2, tokens(7), FinishReason.STOP) == []
    assert merger.finish is None
    assert merger.accept(0, tokens(5, 6), None) == tokens(5, 6, 7)
    assert merger.finish is FinishReason.STOP


def test_nothing_comes_after_the_end() -> None:
    merger = Merger(10)
    assert merger.accept(0, tokens(5), FinishReason.STOP) == tokens(5)
    assert merger.accept(1, tokens(6), None) == []
    assert merger.accept(1, tokens(6), FinishReason.LENGTH) == []
    assert merger.finish is FinishReason.STOP


def test_an_end_without_tokens() -> None:
    merger = Merger(10)
    merger.accept(0, tokens(5, 6), None)
    assert merger.accept(2, [], FinishReason.LENGTH) == []
    assert merger.finish is FinishReason.LENGTH


def test_the_output_ends_at_max_tokens_whatever_workers_say() -> None:
    merger = Merger(2)
    assert merger.accept(0, tokens(5, 6, 7), None) == tokens(5, 6)
    assert merger.finish is FinishReason.LENGTH
    late = Merger(2)
    assert late.accept(0, tokens(5, 6, 7), FinishReason.STOP) == tokens(5, 6)
    assert late.finish is FinishReason.STOP


def test_an_end_that_lies_behind_is_now() -> None:
    merger = Merger(9)
    merger.accept(0, tokens(5, 6, 7), None)
    merger.accept(0, tokens(5), FinishReason.STOP)
    assert merger.finish is FinishReason.STOP


def test_a_replay_goes_on_where_it_was() -> None:
    merger = Merger(10, first_index=4)
    assert merger.accept(3, tokens(1, 2), None) == tokens(2)


@dataclass(frozen=True)
class Message:
    first_index: int
    ids: tuple[int, ...]
    finish: FinishReason | None


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, list[Message]]:
    """(length of the output, messages): P's token 0 and D's cuts of the whole, repeated and shuffled."""
    length = draw(st.integers(1, 12))
    finish = draw(st.sampled_from(list(FinishReason)))
    cuts = sorted(draw(st.sets(st.integers(1, length), max_size=length)) | {length})
    messages = [Message(0, (100,), finish if length == 1 else None)]
    start = 0
    for cut in cuts:
        ids = tuple(range(100 + start, 100 + cut))
        messages.append(Message(start, ids, finish if cut == length else None))
        start = cut
    extra = draw(st.lists(st.sampled_from(messages), max_size=6))
    return length, draw(st.permutations(messages + extra))


@given(runs())
def test_each_index_once_and_the_end_after_all(run: tuple[int, list[Message]]) -> None:
    length, messages = run
    merger, out = Merger(length + 3), []
    for message in messages:
        fresh = merger.accept(message.first_index, tokens(*message.ids), message.finish)
        out += [token.token_id for token in fresh]
        assert out == list(range(100, 100 + len(out)))
        assert merger.next_index == len(out)
        assert (merger.finish is not None) == (len(out) == length and merger.finish is not None)
    assert out == list(range(100, 100 + length))
    assert merger.finish is not None


@given(runs(), st.integers(1, 12))
def test_never_more_than_max_tokens(run: tuple[int, list[Message]], most: int) -> None:
    length, messages = run
    merger = Merger(most)
    count = sum(len(merger.accept(m.first_index, tokens(*m.ids), m.finish)) for m in messages)
    assert count == min(most, length)
    assert merger.finish is not None
