"""Replies made of pieces: what a stream and a whole answer say is the same, and holds the log-probabilities told."""

import json
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from twostroke.engine.request import FinishReason, PromptLogprobs
from twostroke.errors import InvalidRequest
from twostroke.services.gateway.gateway import load_model
from twostroke.services.gateway.generation import Finish, Piece, Timings
from twostroke.services.gateway.http import chat_reply, completion_reply
from twostroke.services.gateway.http.chat_fields import ChatFields
from twostroke.services.gateway.http.chat_reply import ChatReply
from twostroke.services.gateway.http.completion_fields import CompletionFields
from twostroke.services.gateway.http.completion_reply import CompletionReply, Prompt
from twostroke.services.gateway.http.logprobs import Offsets, TokenNames, number, prompt_entries
from twostroke.services.gateway.http.reply import PADDED
from twostroke.services.gateway.served_model import ServedModel
from twostroke.services.settings import GatewaySettings

END = Finish(FinishReason.STOP, "", 3, 2, 0, Timings(), 1, "p0", "d0")


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> ServedModel:
    return load_model(GatewaySettings(model=str(tiny_llama_dir)))


def pieces_of(
    model: ServedModel, tokens: list[int], cuts: list[int], top: int | None, sample: int = 0, **first: Any
) -> list[Piece]:
    """An answer cut at `cuts`; its text comes as a detokenizer gives it."""
    stream = model.detokenizer()
    edges = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    pieces = []
    for start, end in pairwise(edges):
        part = tokens[start:end]
        text = "".join(stream.push(token) for token in part)
        logprobs = (
            [((t, -0.5), *((other, -1.0 - other) for other in range(top))) for t in part] if top is not None else []
        )
        pieces.append(Piece(start, part, text, logprobs, sample=sample, **(first if start == 0 else {})))
    end_piece = Piece(len(tokens), [], stream.flush(), [], END, sample)
    return [*pieces, end_piece]


def chunks(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix("data: ")) for event in data.decode().split("\n\n") if event]


TOKENS = st.lists(st.integers(0, 200), max_size=12)
CUTS = st.lists(st.integers(0, 12), max_size=4)
SLOW = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)


@SLOW
@given(TOKENS, CUTS, st.one_of(st.none(), st.integers(0, 3)), st.booleans())
def test_a_chat_s_stream_says_what_the_whole_says(
    model: ServedModel, tokens: list[int], cuts: list[int], top: int | None, as_ids: bool
) -> None:
    asked = {"messages": 0, "logprobs": top is not None, "return_token_ids": True, "n": 2}
    names = TokenNames(model, as_ids=as_ids)
    whole = ChatReply("r", model.name, ChatFields.read(asked), names, [1])
    fields = ChatFields.read({**asked, "stream": True, "stream_options": {"include_usage": True}})
    stream = ChatReply("r", model.name, fields, names, [1])
    seen: list[dict[str, Any]] = []
    for sample in (1, 0):
        for piece in pieces_of(model, tokens, cuts, top, sample):
            whole.take(0, piece)
            seen += chunks(stream.events(0, piece))
    seen += chunks(stream.usage_event())
    told = json.loads(whole.whole())
    ChatCompletion.model_validate(told, strict=True)
    for chunk in seen:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    for index, choice in enumerate(told["choices"]):
        mine = [c for chunk in seen for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        entries = [e for c in mine if c["logprobs"] for e in c["logprobs"]["content"]]
        assert entries == (choice["logprobs"]["content"] if top is not None else [])
        assert [t for c in mine for t in c.get("token_ids", [])] == choice["token_ids"] == tokens
        assert mine[-1]["delta"] == {}
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "stop"
    assert seen[-1]["usage"] == told["usage"]
    assert told["usage"]["prompt_tokens"] == 3


@SLOW
@given(TOKENS, CUTS, st.one_of(st.none(), st.integers(0, 3)), st.lists(st.integers(5, 200), min_size=1, max_size=6))
def test_a_completion_s_stream_says_what_the_whole_says(
    model: ServedModel, tokens: list[int], cuts: list[int], top: int | None, prompt: list[int]
) -> None:
    """With the prompt in front, and its log-probabilities."""
    asked: dict[str, Any] = {"prompt": 0, "echo": True, "logprobs": top, "return_token_ids": True}
    names = TokenNames(model, as_ids=False)
    said = Prompt(model.tokenizer.decode(prompt), prompt)
    scores = None if top is None else scores_of(prompt, top)
    whole = CompletionReply("r", model.name, CompletionFields.read(asked), names, [said])
    stream = CompletionReply("r", model.name, CompletionFields.read({**asked, "stream": True}), names, [said])
    seen: list[dict[str, Any]] = []
    pieces = pieces_of(model, tokens, cuts, top)
    first = pieces[0]
    pieces[0] = Piece(0, first.token_ids, first.text, first.logprobs, first.finish, 0, scores)
    for piece in pieces:
        whole.take(0, piece)
        seen += chunks(stream.events(0, piece))
    told = json.loads(whole.whole())
    if top is None:  # the SDK's types do not know that nothing comes before a prompt's first token
        Completion.model_validate(told, strict=True)
    choice = told["choices"][0]
    mine = [chunk["choices"][0] for chunk in seen]
    assert "".join(c["text"] for c in mine) == choice["text"]
    assert choice["text"].startswith(said.text)
    assert mine[-1]["finish_reason"] == choice["finish_reason"] == "stop"
    if top is None:
        assert choice["logprobs"] is None
        return
    parts = choice["logprobs"]
    assert parts["tokens"] == [model.tokenizer.token_text(token) for token in (*prompt, *tokens)]
    assert parts["token_logprobs"] == [None, *[-0.25] * (len(prompt) - 1), *[-0.5] * len(tokens)]
    assert parts["top_logprobs"][0] is None
    assert all(len(values) <= top + 1 for values in parts["top_logprobs"][1:])
    offsets = [at for c in mine if c["logprobs"] for at in c["logprobs"]["text_offset"]]
    assert offsets == sorted(offsets)
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert [value for c in mine if c["logprobs"] for value in c["logprobs"][name]] == parts[name]


def scores_of(prompt: list[int], top: int) -> PromptLogprobs:
    ids, values = array("I"), array("f")
    for token in prompt[1:]:
        ids.extend([token, *range(top)])
        values.extend([-0.25, *(-2.0 - other for other in range(top))])
    return PromptLogprobs(1, array("I", [1 + top] * (len(prompt) - 1)), ids, values)


def test_offsets_point_into_the_text(model: ServedModel) -> None:
    text = "a é€ 😀b"
    ids = model.tokenizer.encode_plain(text)
    offsets, names = Offsets(), TokenNames(model, as_ids=False)
    places = [offsets.take(names.shown(token)) for token in ids]
    assert len(ids) > len(text)  # characters of several tokens
    whole = [at for at, token in zip(places, ids, strict=True) if names(token) == text[at]]
    assert len(whole) == 4
    special = min(model.special_token_ids)
    assert offsets.take(names.shown(special)) == offsets.take(b"x") == len(text)


def test_prompt_logprobs(model: ServedModel) -> None:
    names = TokenNames(model, as_ids=False)
    told = json.loads(prompt_entries(scores_of([10, 11, 1], 2), names))
    assert told == [
        None,
        {
            "11": {"logprob": -0.25, "rank": None, "decoded_token": names(11)},
            "0": {"logprob": -2.0, "rank": 1, "decoded_token": names(0)},
            "1": {"logprob": -3.0, "rank": 2, "decoded_token": names(1)},
        },
        {
            "1": {"logprob": -3.0, "rank": 2, "decoded_token": names(1)},
            "0": {"logprob": -2.0, "rank": 1, "decoded_token": names(0)},
        },
    ]
    scores = scores_of([10, 11, 1], 2)
    for fields, reply in (
        (ChatFields.read({"messages": 0, "prompt_logprobs": 2}), ChatReply),
        (CompletionFields.read({"prompt": 0, "prompt_logprobs": 2}), CompletionReply),
    ):
        it: Any = reply("r", model.name, fields, names, [Prompt()])  # type: ignore[operator]
        it.take(0, Piece(0, [5], "x", [], END, 0, scores))
        whole = json.loads(it.whole())
        assert (whole if reply is ChatReply else whole["choices"][0])["prompt_logprobs"] == told


def test_numbers_that_json_cannot_say() -> None:
    assert (number(float("-inf")), number(float("nan")), number(-1.5)) == (-9999.0, None, -1.5)


def test_an_answer_that_is_too_large(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_reply, "MAX_PLAIN_CHARACTERS", 100)
    monkeypatch.setattr(completion_reply, "MAX_PLAIN_CHARACTERS", 100)
    names = TokenNames(model, as_ids=False)
    for it in (
        ChatReply("r", model.name, ChatFields.read({"messages": 0}), names, []),
        CompletionReply("r", model.name, CompletionFields.read({"prompt": 0}), names, [Prompt()]),
    ):
        it.take(0, Piece(0, [5], "x" * 100, []))
        with pytest.raises(InvalidRequest) as caught:
            it.take(0, Piece(1, [5], "x", []))
        assert caught.value.field == "stream"


def test_pieces_without_news_make_no_chunk(model: ServedModel) -> None:
    names = TokenNames(model, as_ids=False)
    chat = ChatReply("r", model.name, ChatFields.read({"messages": 0, "stream": True}), names, [])
    assert len(chunks(chat.events(0, Piece(0, [5], "", [])))) == 1  # the role
    assert chat.events(0, Piece(1, [5], "", [])) == b""
    plain = CompletionReply(
        "r", model.name, CompletionFields.read({"prompt": 0, "stream": True}), names, [Prompt()]
    )  # fmt: skip
    assert plain.events(0, Piece(0, [5], "", [])) == b""
    assert chunks(plain.events(0, Piece(1, [], "", [], END)))[0]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_what_chunks_tell_besides(model: ServedModel, kind: str) -> None:
    """Counts so far in each, and noise that makes them a few sizes only."""
    options = {"continuous_usage_stats": True, "include_obfuscation": True}
    asked: dict[str, Any] = {"stream": True, "stream_options": options}
    names = TokenNames(model, as_ids=False)
    reply: ChatReply | CompletionReply
    if kind == "chat":
        reply = ChatReply("r", model.name, ChatFields.read({"messages": 0, **asked}), names, [7, 8])
    else:
        fields = CompletionFields.read({"prompt": "x", **asked})
        reply = CompletionReply("r", model.name, fields, names, [Prompt("x", [7, 8])])
    events = b""
    for piece in pieces_of(model, list(range(50, 62)), [1, 4], None):
        events += reply.events(0, piece)
    seen = chunks(events)
    counts = [chunk["usage"]["completion_tokens"] for chunk in seen]
    assert counts == [1, 1, 4, 12, 12][-len(seen) :]
    assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in seen)
    assert all(chunk["usage"]["total_tokens"] == 2 + chunk["usage"]["completion_tokens"] for chunk in seen)
    assert len({len(event) % PADDED for event in events.split(b"\n\n")[:-1]}) <= 2  # counts have one digit or two
    assert len({chunk["obfuscation"] for chunk in seen}) == len(seen)
    assert reply.usage_event() == b""
