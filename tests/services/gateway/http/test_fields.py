"""What the bodies of requests mean: every field, its default, its kind; what is unknown or not supported is named."""

import json
from dataclasses import fields as dataclass_fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic_core import from_json

from twostroke.engine.check_controls import MAX_LISTED
from twostroke.engine.request import Constraint, ConstraintKind
from twostroke.services.gateway.generation import Sampling, Stopping, TextInput, TokenInput
from twostroke.services.gateway.http.chat_fields import ChatFields
from twostroke.services.gateway.http.completion_fields import CompletionFields, read_prompts
from twostroke.services.gateway.http.errors import HttpRefusal
from twostroke.services.gateway.http.fields import Fields
from twostroke.services.gateway.http.generation_fields import StreamOptions
from twostroke.services.gateway.http.tokenize import DetokenizeFields, TokenizeFields
from twostroke.services.gateway.oip.sampling_fields import SamplingFields

PROMPT: dict[str, Any] = {"prompt": "hello"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def completion(**more: Any) -> CompletionFields:
    fields = CompletionFields.read({**PROMPT, **more})
    fields.check()
    return fields


def chat(**more: Any) -> ChatFields:
    fields = ChatFields.read({**CHAT, **more})
    fields.check()
    return fields


def refusal(work: Any, *arguments: Any, **more: Any) -> HttpRefusal:
    with pytest.raises(HttpRefusal) as caught:
        work(*arguments, **more)
    return caught.value


def test_defaults_are_the_api_s() -> None:
    for fields in (completion(), chat()):
        assert fields.sampling() == Sampling()
        assert (fields.n, fields.stream, fields.cache_salt) == (1, False, "")
        assert fields.read_stream_options() == StreamOptions()
        assert fields.stopping(None) == Stopping()
    assert completion().max_tokens == 16
    assert chat().limit is None
    assert completion(max_tokens=None, temperature=None, stop=None, n=None) == completion()
    assert chat(max_tokens=None, logprobs=None, stream_options=None, user=None) == chat()


SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 0.25}, {"temperature": 0.25}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"top_k": 7}, {"top_k": 7}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"guided_regex": "a+"}, {"constraint": Constraint(ConstraintKind.REGEX, "a+")}),
    ({"min_p": 0.125}, {"min_p": 0.125}),
    ({"typical_p": 0.75}, {"typical_p": 0.75}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
    ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
    ({"seed": 0}, {"seed": 0}),
    ({"seed": -1}, {"seed": (1 << 64) - 1}),
    ({"seed": -(1 << 63)}, {"seed": 1 << 63}),
    ({"seed": (1 << 64) - 1}, {"seed": (1 << 64) - 1}),
    ({"logit_bias": {"5": -100, "50256": 1.5}}, {"logit_bias": ((5, -100.0), (50256, 1.5))}),
    ({"logit_bias": {}}, {"logit_bias": ()}),
    ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": (1, 2)}),
    ({"banned_token_ids": [3]}, {"banned_token_ids": (3,)}),
    ({"bad_words": ["a", "b c"]}, {"bad_words": ("a", "b c")}),
]
STOPPING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stop": "END"}, {"strings": ("END",)}),
    ({"stop": ["a", "b"]}, {"strings": ("a", "b")}),
    ({"stop": []}, {"strings": ()}),
    ({"stop_token_ids": [4, 5]}, {"token_ids": (4, 5)}),
    ({"include_stop_str_in_output": True}, {"include_stop": True}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"min_tokens": 3}, {"min_tokens": 3}),
]


@pytest.mark.parametrize("read", [completion, chat])
@pytest.mark.parametrize(("sent", "meant"), SAMPLING, ids=[json.dumps(sent) for sent, _ in SAMPLING])
def test_each_field_of_sampling(read: Any, sent: dict[str, Any], meant: dict[str, Any]) -> None:
    assert read(**sent).sampling() == Sampling(**meant)


@pytest.mark.parametrize("read", [completion, chat])
@pytest.mark.parametrize(("sent", "meant"), STOPPING, ids=[json.dumps(sent) for sent, _ in STOPPING])
def test_each_field_of_stopping(read: Any, sent: dict[str, Any], meant: dict[str, Any]) -> None:
    assert read(**sent).stopping(9) == Stopping(max_tokens=9, **meant)


def test_every_field_of_the_gateway_s_can_be_asked_for() -> None:
    sampled = {name for sent, meant in SAMPLING for name in meant}
    assert sampled == {field.name for field in dataclass_fields(Sampling)}
    stopped = {name for sent, meant in STOPPING for name in meant} | {"max_tokens"}
    assert stopped == {field.name for field in dataclass_fields(Stopping)}


FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
IDS = st.lists(st.integers(0, 1 << 20), max_size=5)
WISHES = st.fixed_dictionaries(
    {},
    optional={
        "temperature": FLOATS, "top_p": FLOATS, "min_p": FLOATS, "typical_p": FLOATS, "repetition_penalty": FLOATS,
        "presence_penalty": FLOATS, "frequency_penalty": FLOATS, "top_k": st.integers(0, 1 << 31),
        "seed": st.integers(-(1 << 63), (1 << 64) - 1), "allowed_token_ids": IDS, "banned_token_ids": IDS,
        "bad_words": st.lists(st.text(), max_size=3), "stop_token_ids": IDS, "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 99), "stop": st.lists(st.text(), max_size=3),
        "include_stop_str_in_output": st.booleans(), "logit_bias": st.dictionaries(st.integers(0, 99), FLOATS),
    },
)  # fmt: skip


@given(WISHES)
def test_what_is_sent_is_meant(wishes: dict[str, Any]) -> None:
    """Through JSON and back, whatever is asked for."""
    body = {**CHAT, **wishes}
    if "logit_bias" in wishes:
        body["logit_bias"] = {str(token): value for token, value in wishes["logit_bias"].items()}
    fields = ChatFields.read(from_json(json.dumps(body)))
    sampling, stopping = fields.sampling(), fields.stopping(None)
    for name, value in wishes.items():
        match name:
            case "seed":
                assert sampling.seed == value % (1 << 64)
            case "logit_bias":
                assert dict(sampling.logit_bias) == value
            case "stop":
                assert stopping.strings == tuple(value)
            case "stop_token_ids":
                assert stopping.token_ids == tuple(value)
            case "include_stop_str_in_output":
                assert stopping.include_stop == value
            case "ignore_eos" | "min_tokens":
                assert getattr(stopping, name) == value
            case _:
                told = getattr(sampling, name)
                assert told == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    "sent",
    [
        {"temperature": "1"}, {"temperature": True}, {"top_k": 1.5}, {"top_k": True}, {"n": "2"}, {"n": 0}, {"n": 17},
        {"n": 10**30}, {"stream": 1}, {"stream": "true"}, {"stop": 5}, {"stop": [5]}, {"stop_token_ids": ["a"]},
        {"stop_token_ids": [True]}, {"logit_bias": [1]}, {"logit_bias": {"5": "x"}}, {"seed": 1.0}, {"ignore_eos": 0},
        {"bad_words": "a"}, {"max_tokens": "5"}, {"max_tokens": [5]}, {"user": 5}, {"user": "x" * 513},
        {"cache_salt": "x" * 257}, {"prompt_logprobs": True}, {"model": 5}, {"min_p": float("inf")},
        {"min_p": float("nan")}, {"stream_options": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("schema", [CompletionFields, ChatFields])
def test_a_value_of_a_wrong_kind_is_named(schema: type[Fields], sent: dict[str, Any]) -> None:
    (name,) = sent
    told = refusal(schema.read, {**PROMPT, **sent} if schema is CompletionFields else {**CHAT, **sent})
    assert told.kind.status == 400
    assert (told.field or "").startswith(name)
    assert name in told.message
    assert told.kind.code == "invalid_value"


@pytest.mark.parametrize(
    ("value", "field"),
    [(1 << 64, None), (-(1 << 63) - 1, "seed")],
)
def test_a_seed_has_64_bits(value: int, field: str | None) -> None:
    if field is None:  # the gateway's own check says it
        assert completion(seed=value).sampling().seed == value
    else:
        assert refusal(completion(seed=value).sampling).field == field


@pytest.mark.parametrize("key", ["x", "", " 5", "+5", "05", "5.0", "-1", "٥", "9" * 11])
def test_biased_tokens_are_named_by_numbers(key: str) -> None:
    assert refusal(chat(logit_bias={key: 1}).sampling).field == "logit_bias"


def test_lists_that_are_too_long_are_cut_where_it_can_be_told() -> None:
    many = list(range(MAX_LISTED + 500))
    sampling = chat(
        allowed_token_ids=many, banned_token_ids=many, bad_words=["a"] * len(many), logit_bias={str(i): 1 for i in many}
    ).sampling()
    for name in ("allowed_token_ids", "banned_token_ids", "bad_words", "logit_bias"):
        assert len(getattr(sampling, name)) == MAX_LISTED + 1


# What is not known, or not supported


@pytest.mark.parametrize("schema", [CompletionFields, ChatFields, TokenizeFields, DetokenizeFields, StreamOptions])
@pytest.mark.parametrize("value", [None, 1, "x" * 1000, {}])
def test_an_unknown_field_is_refused_by_name(schema: type[Fields], value: Any) -> None:
    base = {CompletionFields: PROMPT, ChatFields: CHAT, DetokenizeFields: {"tokens": [1]}}.get(schema, {})
    told = refusal(schema.read, {**base, "temprature": value})
    assert (told.field, told.kind.code) == ("temprature", "unknown_parameter")
    long = refusal(schema.read, {**base, "x" * 5000: value})
    assert len(long.message) < 150


UNSUPPORTED = [
    (schema, base, name)
    for schema, base in ((CompletionFields, PROMPT), (ChatFields, CHAT), (TokenizeFields, {"prompt": "x"}))
    for name in schema.unsupported
]


@pytest.mark.parametrize(("schema", "base", "name"), UNSUPPORTED, ids=[f"{s.__name__}-{n}" for s, _, n in UNSUPPORTED])
def test_what_is_not_supported_is_refused_unless_it_asks_for_nothing(
    schema: type[Fields], base: dict[str, Any], name: str
) -> None:
    told = refusal(schema.read, {**base, name: {"something": "else"}})
    assert (told.field, told.kind.code) == (name, "unsupported_parameter")
    assert name in told.message
    plain = schema.read(base)
    assert schema.read({**base, name: None}) == plain
    for harmless in schema.unsupported[name]:
        assert schema.read({**base, name: harmless}) == plain


def test_true_is_not_one() -> None:
    assert refusal(chat, priority=False).field == "priority"
    assert refusal(chat, priority=1.5).field == "priority"
    assert refusal(chat, best_of=True).field == "best_of"
    assert refusal(chat, skip_special_tokens=1).field == "skip_special_tokens"


@pytest.mark.parametrize("name", ["functions", "audio", "web_search_options", "moderation"])
def test_openai_s_own_fields_are_known(name: str) -> None:
    assert refusal(chat, **{name: {"type": "json_object"}}).kind.code == "unsupported_parameter"


@pytest.mark.parametrize("body", [None, [], "x", 5, True])
def test_a_body_is_an_object(body: Any) -> None:
    for schema in (CompletionFields, ChatFields, TokenizeFields):
        assert "JSON object" in refusal(schema.read, body).message


def test_what_is_missing() -> None:
    assert refusal(CompletionFields.read, {}).kind.code == "missing_required_parameter"
    assert refusal(CompletionFields.read, {"prompt": None}).field == "prompt"
    assert refusal(ChatFields.read, {"messages": None}).field == "messages"


# Fields that contradict each other


@pytest.mark.parametrize(
    ("read", "sent", "field"),
    [
        (completion, {"best_of": 2}, "best_of"),
        (completion, {"best_of": 1, "n": 2}, "best_of"),
        (completion, {"stream": True, "echo": True, "logprobs": 0, "n": 2}, "n"),
        (completion, {"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
        (completion, {"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        (chat, {"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        (chat, {"top_logprobs": 0}, "top_logprobs"),
        (chat, {"prediction": {"type": "content"}}, "prediction.content"),
        (chat, {"prediction": {"type": "content", "content": 5}}, "prediction.content"),
        (chat, {"prediction": {"type": "draft", "content": "x"}}, "prediction.type"),
        (completion, {"suffix": "x", "echo": True}, "suffix"),
        (chat, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ],
)
def test_contradictions(read: Any, sent: dict[str, Any], field: str) -> None:
    assert refusal(read, **sent).field == field


def test_no_contradictions() -> None:
    assert completion(best_of=3, n=3).n == 3
    assert completion(echo=True, logprobs=2, prompt_logprobs=2).echo
    assert chat(max_tokens=5, max_completion_tokens=5).limit == 5
    assert chat(max_completion_tokens=7).limit == chat(max_tokens=7).limit == 7
    assert completion(echo=True, max_tokens=0).prompt_only
    assert chat(prediction={"type": "content", "content": "x"}).sampling() == Sampling()
    assert not completion(max_tokens=0).prompt_only


@pytest.mark.parametrize(
    ("given", "kept"), [(None, [1, 2, 3]), (2, [2, 3]), (3, [1, 2, 3]), (9, [1, 2, 3]), (-1, [2, 3])]
)
def test_the_end_of_a_prompt_is_kept(given: int | None, kept: list[int]) -> None:
    fields = completion(truncate_prompt_tokens=given)
    assert fields.truncated([1, 2, 3], 2) == kept
    assert fields.counted == (given is not None)
    for wrong in (0, -2):
        assert refusal(completion(truncate_prompt_tokens=wrong).truncated, [1], 2).field == "truncate_prompt_tokens"


def test_stream_options() -> None:
    def read(options: dict[str, Any] | None, *, stream: bool = True) -> StreamOptions:
        return chat(stream=stream, stream_options=options).read_stream_options()

    names = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    assert read(None) == read({}) == read(dict.fromkeys(names, False)) == StreamOptions()
    for name in names:
        assert [each for each in names if getattr(read({name: True}), each)] == [name]
        assert refusal(read, {name: 1}).field == f"stream_options.{name}"
    assert refusal(read, {"foo": True}).field == "stream_options.foo"
    assert refusal(read, {"include_usage": True}, stream=False).field == "stream_options"
    assert chat(stream=True, stream_options={"continuous_usage_stats": True}).counted
    assert not chat(stream=True, stream_options={"include_usage": True}).counted


# Prompts


def test_prompts() -> None:
    assert read_prompts("", 1, 9) == [TextInput("")]
    assert read_prompts("text", 1, 9) == [TextInput("text")]
    assert read_prompts(["text"], 1, 9, special=False) == [TextInput("text", add_special_tokens=False)]
    assert read_prompts([1, 2], 1, 9) == [TokenInput([1, 2])]
    assert read_prompts(["a", [1], "b", []], 1, 9) == [TextInput("a"), TokenInput([1]), TextInput("b"), TokenInput([])]
    assert read_prompts([1, "x", None], 1, 2) == [TokenInput([1, "x", None])]  # refused for its length, unread


@pytest.mark.parametrize(
    ("value", "field"),
    [(5, "prompt"), (True, "prompt"), ({}, "prompt"), ([], "prompt"), ([1, True], "prompt"), ([1, "a"], "prompt"),
     ([1.0], "prompt[0]"), ([None], "prompt[0]"), (["a", 1], "prompt[1]"), ([[1], [2.0]], "prompt[1]"),
     ([["a"]], "prompt[0]"), (["a"] * 129, "prompt")],
)  # fmt: skip
def test_prompts_that_are_none(value: Any, field: str) -> None:
    assert refusal(read_prompts, value, 1, 9).field == field


def test_prompts_times_answers_are_bounded() -> None:
    assert len(read_prompts(["a"] * 8, 16, 9)) == 8
    assert refusal(read_prompts, ["a"] * 9, 16, 9).field == "prompt"


@pytest.mark.parametrize("kind", [CompletionFields, ChatFields, TokenizeFields, DetokenizeFields, SamplingFields])
def test_of_very_many_faults_one_is_gathered(kind: type[Fields]) -> None:
    """Gathering all of them would hold up every stream."""
    needed = {"prompt": "x", "messages": [], "tokens": []}
    for name in kind.names():
        for wrong in ([object()] * 50, {str(number): object() for number in range(50)}):
            given = {key: value for key, value in needed.items() if key in kind.names()} | {name: wrong}
            try:
                kind.model_validate(given)
            except ValidationError as error:
                assert error.error_count() <= 3, name  # one of each kind that it may be of
    with pytest.raises(HttpRefusal) as caught:
        kind.read({f"x{number}": 1 for number in range(50)})
    cause = caught.value.__context__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() <= 3
