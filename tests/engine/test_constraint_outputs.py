"""Outputs of real models under constraints: greedy and hot, of every kind, with other controls."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twostroke.engine.build import Engine, build_engine
from twostroke.engine.config import EngineOptions
from twostroke.engine.request import (
    Constraint,
    ConstraintKind,
    FinishReason,
    Request,
    SamplingParams,
    SequenceKey,
    Token,
)
from twostroke.engine.tokenizer import Tokenizer
from twostroke.errors import InvalidRequest

K = ConstraintKind
STRINGS = {"type": "string", "maxLength": 6}
PERSON = {
    "type": "object",
    "properties": {
        "name": STRINGS,
        "born": {"type": "integer", "minimum": 1900, "maximum": 2030},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "born"],
    "additionalProperties": False,
}
NESTED = {
    "$defs": {"node": {"type": "object", "properties": {"v": {"enum": [1, "é"]}, "next": {"anyOf": [
        {"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["v", "next"], "additionalProperties": False}},
    "$ref": "#/$defs/node",
}  # fmt: skip
LIST = {
    "type": "array",
    "items": {"type": "number", "multipleOf": 5, "minimum": 0, "maximum": 50},
    "minItems": 2,
    "maxItems": 4,
}
DATE = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}, "id": {"type": "string",
        "pattern": "^[A-F]{2}-\\d{3}$"}}, "required": ["day", "id"], "additionalProperties": False}  # fmt: skip


def is_person(value: Any) -> bool:
    return (
        {"name", "born"} <= value.keys() <= {"name", "born", "ok"}
        and len(value["name"]) <= 6
        and 1900 <= value["born"] <= 2030
        and isinstance(value.get("ok", True), bool)
    )


def is_node(value: Any) -> bool:
    return value is None or (value.keys() == {"v", "next"} and value["v"] in (1, "é") and is_node(value["next"]))


def is_list(value: Any) -> bool:
    return 2 <= len(value) <= 4 and all(0 <= number <= 50 and number % 5 == 0 for number in value)


def is_date(value: Any) -> bool:
    return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", value["day"]) and re.fullmatch(r"[A-F]{2}-\d{3}", value["id"]))


def schema(value: Any) -> Constraint:
    return Constraint(K.JSON_SCHEMA, json.dumps(value))


def of_json(check: Callable[[Any], bool]) -> Callable[[str], bool]:
    return lambda text: check(json.loads(text))


CASES: list[tuple[Constraint, Callable[[str], Any]]] = [
    (schema(PERSON), of_json(is_person)),
    (schema(NESTED), of_json(is_node)),
    (schema(LIST), of_json(is_list)),
    (schema(DATE), of_json(is_date)),
    (Constraint(K.REGEX, r"[a-zé]{2,5}(, [0-9]+){1,2}"), re.compile(r"[a-zé]{2,5}(, [0-9]+){1,2}").fullmatch),
    (
        Constraint(K.CHOICE, '["yes", "nein", "日本 😀", "<|im_end|>"]'),
        {"yes", "nein", "日本 😀", "<|im_end|>"}.__contains__,
    ),
    (Constraint(K.GRAMMAR, 'start: "(" start ")" | /[0-9]{1,3}/'), re.compile(r"(\(*)[0-9]{1,3}\)*").fullmatch),
    (Constraint(K.JSON_OBJECT), of_json(lambda value: isinstance(value, dict))),
]


def build(path: Path, dtype: Any = "float32") -> Engine:
    return build_engine(path, EngineOptions(kv_memory=64 << 20, dtype=dtype), fingerprint="f")


def serve(
    engine: Engine, asked: list[SamplingParams], prompt: list[int]
) -> tuple[list[list[Token]], list[FinishReason | Exception]]:
    """All at once."""
    tokens: list[list[Token]] = [[] for _ in asked]
    ends: list[Any] = [None] * len(asked)
    for number, params in enumerate(asked):
        engine.core.add(Request(SequenceKey(1, number, 0, 0), prompt, params))
    while engine.core.has_work():
        result = engine.core.step()
        for key, error in result.failures:
            ends[key.request] = error
        for output in result.outputs:
            tokens[output.key.request] += output.tokens
            ends[output.key.request] = output.finish or ends[output.key.request]
    engine.core.check_integrity(idle=True)
    return tokens, ends


def check(path: Path, most: int, seeds: int) -> None:
    engine, tokenizer = build(path, "bfloat16"), Tokenizer.from_dir(path)
    for temperature in (0.0, 1.5):
        asked = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=most, constraint=constraint)
            for constraint, _ in CASES
            for seed in range(seeds if temperature else 1)
        ]
        told, ends = serve(engine, asked, tokenizer.encode("The answer is: "))
        complete = 0
        for params, tokens, end in zip(asked, told, ends, strict=True):
            assert isinstance(end, FinishReason), end
            ids = [token.token_id for token in tokens]
            fits = next(fits for constraint, fits in CASES if constraint == params.constraint)
            if end is FinishReason.STOP:
                complete += 1
                assert ids[-1] in engine.config.eos_token_ids
                assert tokenizer.special_ids.isdisjoint(ids[:-1])
                text = tokenizer.decode(ids)
                assert fits(text), (params.constraint, text)
        assert complete >= len(asked) // 2, "most are done within the limit"


def test_outputs_of_a_random_model(tiny_llama_dir: Path) -> None:
    check(tiny_llama_dir, 160, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_outputs_of_the_embedded_model(smollm2_dir: Path) -> None:
    check(smollm2_dir, 80, 2)


def test_log_probabilities_are_the_model_s_own(tiny_llama_dir: Path) -> None:
    """Those of a free sequence at the same position, whatever the constraint forbids."""
    engine, tokenizer = build(tiny_llama_dir), Tokenizer.from_dir(tiny_llama_dir)
    prompt = tokenizer.encode("some words")
    plain = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    bound = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, constraint=Constraint(K.REGEX, "[0-9]+"))
    (free, constrained), _ = serve(engine, [plain, bound], prompt)
    assert free[0].token_id != constrained[0].token_id
    assert tokenizer.token_text(constrained[0].token_id).isdigit()
    for mine, other in zip(constrained[0].logprobs[1:], free[0].logprobs[1:], strict=True):
        assert mine == (other[0], pytest.approx(other[1], abs=1e-5))
    assert constrained[0].logprobs[0][1] <= free[0].logprobs[0][1]


def test_with_other_controls(tiny_llama_dir: Path) -> None:
    engine, tokenizer = build(tiny_llama_dir), Tokenizer.from_dir(tiny_llama_dir)
    digits = Constraint(K.REGEX, "[0-9]{4,8}")
    id_of = {text: tokenizer.encode_plain(text)[0] for text in "123456789a"}
    ends = tuple(engine.config.eos_token_ids)
    asked = [
        SamplingParams(max_tokens=20, constraint=digits, banned_token_ids=tuple(id_of[d] for d in "12345678")),
        SamplingParams(max_tokens=20, constraint=digits, allowed_token_ids=(id_of["7"], id_of["a"], *ends)),
        SamplingParams(max_tokens=20, constraint=digits, allowed_token_ids=(id_of["a"],)),
        SamplingParams(max_tokens=20, constraint=digits, allowed_token_ids=(id_of["7"],)),
        SamplingParams(temperature=0.0, max_tokens=20, constraint=digits, repetition_penalty=50.0, min_tokens=8),
        SamplingParams(temperature=0.9, max_tokens=20, constraint=digits, typical_p=0.5, seed=3),
        SamplingParams(temperature=0.9, max_tokens=20, constraint=digits, logit_bias=((id_of["9"], 900.0),)),
        SamplingParams(
            max_tokens=20, constraint=digits, stop_token_ids=(id_of["7"],), logit_bias=((id_of["7"], 900.0),)
        ),
    ]
    told, how = serve(engine, asked, tokenizer.encode("x"))
    texts = [tokenizer.decode([token.token_id for token in tokens]) for tokens in told]
    assert re.fullmatch("[09]{4,8}", texts[0])
    assert re.fullmatch("7{4,8}", texts[1])
    assert isinstance(how[2], InvalidRequest)
    assert (how[2].field, texts[2]) == ("sampling", "")
    assert isinstance(how[3], InvalidRequest), "an end is not among the allowed ones"
    assert texts[3] == "7" * 8
    assert len(set(texts[4])) == len(texts[4]) == 8
    assert re.fullmatch("[0-9]{4,8}", texts[5])
    assert texts[6].startswith("9999")
    assert (texts[7], how[7]) == ("7", FinishReason.STOP), "a stop token ends what is not complete"
