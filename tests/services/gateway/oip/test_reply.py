"""Pieces of answers as responses: what is new in each, what stays, what is too large."""

from pathlib import Path
from typing import Any

import pytest

from twostroke.engine.request import FinishReason
from twostroke.errors import InvalidRequest
from twostroke.services.gateway.gateway import load_model
from twostroke.services.gateway.generation import Finish, Piece, Timings
from twostroke.services.gateway.http.logprobs import TokenNames
from twostroke.services.gateway.oip.reply import Reply
from twostroke.services.gateway.oip.request import read_request
from twostroke.services.settings import GatewaySettings

from ...oip_client import infer, is_final, read_output

END = Finish(FinishReason.LENGTH, "", 3, 0, 2, Timings(), 0, "p", "d")


@pytest.fixture(scope="module")
def names(tiny_llama_dir: Path) -> TokenNames:
    return TokenNames(load_model(GatewaySettings(model=str(tiny_llama_dir))), as_ids=False)


def piece(text: str, *tokens: int, sample: int = 0, finish: Finish | None = None) -> Piece:
    return Piece(0, list(tokens), text, [((token, -0.5), (token, -0.5)) for token in tokens], finish, sample)


def reply(names: TokenNames, most: int = 1 << 20, **asked: Any) -> Reply:
    return Reply(read_request(infer("P ", id="x", **asked)), "llama", names, prompt_tokens=3, most_bytes=most)


ASKED = {"return_finish_reason": True, "return_num_output_tokens": True, "return_cumulative_logprob": True}


def told(response: Any) -> list[Any]:
    outputs = ("text_output", "finish_reason", "num_output_tokens", "cumulative_logprob")
    return [read_output(response, name) for name in outputs]


def test_a_response_holds_what_came_since_the_last_one(names: TokenNames) -> None:
    it = reply(names, stream=True, sampling={"n": 2}, **ASKED)
    it.take(piece("a", 5))
    it.take(piece("b", 6, 7, sample=1))
    assert told(it.response(final=False)) == [["a", "b"], ["None", "None"], [1, 2], [-0.5, -1.0]]
    sign = it.response(final=False)
    assert told(sign) == [["", ""], ["None", "None"], [0, 0], [-0.5, -1.0]]
    assert not is_final(sign)
    it.take(piece("c", 8, sample=1, finish=END))
    assert not it.ended
    assert told(it.response(final=False)) == [["", "c"], ["None", "length"], [0, 1], [-0.5, -1.5]]
    it.take(piece("d", finish=END))
    assert it.ended
    last = it.response(final=True)
    assert told(last) == [["d", ""], ["length", "length"], [0, 0], [-0.5, -1.5]]
    assert is_final(last)


def test_the_prompt_comes_once_in_front_of_each_answer(names: TokenNames) -> None:
    it = reply(names, sampling={"n": 2})
    it.take(piece("a", 5, finish=END))
    it.take(piece("b", 5, sample=1, finish=END))
    assert read_output(it.response(), "text_output") == ["P a", "P b"]
    assert read_output(it.response(), "text_output") == ["", ""]


def test_an_end_alone_says_whose(names: TokenNames) -> None:
    end = reply(names, stream=True).end()
    assert (end.model_name, end.model_version, end.id, is_final(end), len(end.outputs)) == ("llama", "1", "x", True, 0)
    assert not reply(names).response().parameters


def test_what_is_no_character_is_replaced(names: TokenNames) -> None:
    it = reply(names, stream=True)
    it.take(piece("\ud800", 5))
    assert read_output(it.response(), "text_output") == ["?"]


@pytest.mark.parametrize("asked", [{}, {"return_logprobs": True, "sampling": {"logprobs": 1}}])
def test_what_exceeds_a_message_is_refused(names: TokenNames, asked: dict[str, Any]) -> None:
    it = reply(names, most=1000, **asked)
    with pytest.raises(InvalidRequest, match="exceeds the 1000 bytes of a message") as caught:
        it.take(piece("a" * 300, *[5] * 100))
    assert caught.value.field == "stopping.max_tokens"
    it = reply(names, most=1000, stream=True, **asked)
    for _ in range(500):
        it.take(piece("a", 5))
        it.response(final=False)
