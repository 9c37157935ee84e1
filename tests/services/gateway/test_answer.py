"""The answer: text, stop strings, counts, times."""

from pathlib import Path
from typing import Any

import pytest

from twostroke.engine.detokenizer import Detokenizer
from twostroke.engine.request import FinishReason, Token
from twostroke.engine.tokenizer import Tokenizer
from twostroke.services.gateway.answer import Answer, WorkerReport
from twostroke.services.gateway.generation import Piece

REPORT = WorkerReport(0.1, 0.2, 0.3, 4, "p0", "d0")


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(tiny_llama_dir)


class Clock:
    """Ticks by one second each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def answer(tokenizer: Tokenizer, *stops: str, **fields: Any) -> Answer:
    defaults: dict[str, Any] = {"prompt_tokens": 3, "seed": 9, "logprobs": False, "arrival": 0.0, "clock": Clock()}
    return Answer(Detokenizer(tokenizer), stops, **{**defaults, **fields})


def feed(it: Answer, ids: list[int], finish: FinishReason | None, *, at_once: int = 1) -> list[Piece]:
    pieces = []
    for start in range(0, len(ids), at_once):
        tokens = [Token(id_, ((id_, -1.0),)) for id_ in ids[start : start + at_once]]
        last = start + at_once >= len(ids)
        pieces.append(it.piece(tokens, finish if last else None, lambda: REPORT))
        if pieces[-1].finish is not None:
            break
    return pieces


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_text_is_whole_however_it_is_cut(tokenizer: Tokenizer, at_once: int) -> None:
    text = "the cat 日本 🙂 said é"
    pieces = feed(answer(tokenizer), [*tokenizer.encode(text), 2], FinishReason.STOP, at_once=at_once)
    assert "".join(piece.text for piece in pieces) == text
    assert "\ufffd" not in "".join(piece.text for piece in pieces)
    finish = pieces[-1].finish
    assert finish is not None
    assert (finish.reason, finish.stop_string) == (FinishReason.STOP, "")
    assert finish.output_tokens == len(tokenizer.encode(text)) + 1
    assert (finish.prompt_tokens, finish.cached_tokens, finish.seed) == (3, 4, 9)
    assert (finish.prefill_worker, finish.decode_worker) == ("p0", "d0")


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_a_stop_string_ends_it_with_the_token_that_completed_it(tokenizer: Tokenizer, at_once: int) -> None:
    ids = tokenizer.encode("ab STOP more and more")
    pieces = feed(answer(tokenizer, "STOP"), ids, FinishReason.LENGTH, at_once=at_once)
    assert "".join(piece.text for piece in pieces) == "ab "
    finish = pieces[-1].finish
    assert finish is not None
    assert (finish.reason, finish.stop_string) == (FinishReason.STOP, "STOP")
    assert tokenizer.decode([id_ for piece in pieces for id_ in piece.token_ids]) == "ab STOP"
    assert finish.output_tokens == len(tokenizer.encode("ab STOP"))


def test_a_half_of_a_stop_string_is_sent_at_the_end(tokenizer: Tokenizer) -> None:
    pieces = feed(answer(tokenizer, "STOP"), [*tokenizer.encode("ab ST"), 2], FinishReason.STOP)
    assert [piece.text for piece in pieces[-3:]] == ["", "", "ST"]


def test_a_stop_token_has_no_text_but_is_reported(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("a") + tokenizer.encode("b")
    pieces = feed(answer(tokenizer), [a, b], FinishReason.STOP)
    assert [(piece.text, piece.token_ids) for piece in pieces] == [("a", [a]), ("", [b])]


def test_an_unfinished_character_at_the_end_becomes_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")[:1]
    assert [piece.text for piece in feed(answer(tokenizer), ids, FinishReason.LENGTH)] == ["\ufffd"]


def test_an_end_without_tokens(tokenizer: Tokenizer) -> None:
    it = answer(tokenizer)
    it.piece([Token(10)], None, lambda: REPORT)
    piece = it.piece([], FinishReason.LENGTH, lambda: REPORT)
    assert (piece.first_index, piece.token_ids) == (1, [])
    assert piece.finish is not None
    assert piece.finish.output_tokens == 1


def test_logprobs_only_where_wanted(tokenizer: Tokenizer) -> None:
    assert feed(answer(tokenizer), [10, 11], None)[0].logprobs == []
    assert [p.logprobs for p in feed(answer(tokenizer, logprobs=True), [10, 11], None)] == [
        [((10, -1.0),)],
        [((11, -1.0),)],
    ]


def test_times_by_the_gateway_s_clock(tokenizer: Tokenizer) -> None:
    """Pieces are handed over at 1, 2, 3 and 4 s."""
    finish = feed(answer(tokenizer), [10, 11, 12, 13], FinishReason.LENGTH)[-1].finish
    assert finish is not None
    times = finish.timings
    assert (times.first_token, times.gap01, times.decode, times.total) == (1, 1, 3, 4)
    assert (times.queue, times.prefill, times.transfer) == (0.1, 0.2, 0.3)
    one = feed(answer(tokenizer), [10], FinishReason.LENGTH)[-1].finish
    assert one is not None
    assert (one.timings.first_token, one.timings.gap01, one.timings.decode, one.timings.total) == (1, 0, 0, 1)


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_stop_strings_do_not_count_before_min_tokens(tokenizer: Tokenizer, at_once: int) -> None:
    ids = tokenizer.encode("ab STOP cd STOP ef")
    second = len(tokenizer.encode("ab STOP cd STOP"))
    early = len(tokenizer.encode("ab STOP"))
    for least in (early, second - 1):
        pieces = feed(answer(tokenizer, "STOP", min_tokens=least), ids, FinishReason.LENGTH, at_once=at_once)
        assert "".join(piece.text for piece in pieces) == "ab STOP cd "
        assert sum(len(piece.token_ids) for piece in pieces) == second
    pieces = feed(answer(tokenizer, "STOP", min_tokens=early - 1), ids, FinishReason.LENGTH, at_once=at_once)
    assert "".join(piece.text for piece in pieces) == "ab "
    pieces = feed(answer(tokenizer, "STOP", min_tokens=second), ids, FinishReason.LENGTH, at_once=at_once)
    assert "".join(piece.text for piece in pieces) == "ab STOP cd STOP ef"


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_an_included_stop_string_is_sent(tokenizer: Tokenizer, at_once: int) -> None:
    ids = tokenizer.encode("ab STOP more")
    pieces = feed(answer(tokenizer, "STOP", include_stop=True), ids, FinishReason.LENGTH, at_once=at_once)
    assert "".join(piece.text for piece in pieces) == "ab STOP"
    assert pieces[-1].finish is not None
    assert pieces[-1].finish.stop_string == "STOP"


def test_an_included_stop_token_is_sent_as_text(tokenizer: Tokenizer) -> None:
    """An ordinary one through the stream, a special one by its name; an end of text that nobody listed is not."""
    a, b = tokenizer.encode("a") + tokenizer.encode("b")
    fields = {"include_stop": True, "stop_texts": {b: "", 2: "<|im_end|>"}}
    for last, text in ((b, "b"), (2, "<|im_end|>"), (0, "")):
        pieces = feed(answer(tokenizer, **fields), [a, last], FinishReason.STOP)
        assert [piece.text for piece in pieces] == ["a", text]
        assert pieces[-1].token_ids == [last]
    finish = feed(answer(tokenizer, **fields), [a, b], FinishReason.LENGTH)[-1]
    assert finish.text == "b"


def test_each_piece_tells_the_cached_tokens_that_its_first_tokens_came_with(tokenizer: Tokenizer) -> None:
    it = answer(tokenizer)
    reports = iter([REPORT, WorkerReport(cached_tokens=5)])
    pieces = [it.piece([], None, lambda: next(reports))]
    pieces += [it.piece([Token(id_)], None, lambda: next(reports)) for id_ in (10, 11)]
    pieces.append(it.piece([Token(12)], FinishReason.LENGTH, lambda: next(reports)))
    assert [piece.cached_tokens for piece in pieces] == [0, 4, 4, 5]
