"""Grammars hold a model to its own form of calls: whatever is drawn under them, the format's parser reads calls."""

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from twostroke.engine.grammar import compile_grammar
from twostroke.engine.request import Constraint, ConstraintKind
from twostroke.engine.tokenizer import Tokenizer
from twostroke.engine.vocabulary import make_vocabulary
from twostroke.errors import InvalidRequest
from twostroke.services.gateway.tools.events import Arguments, CallBegun, CallEnded, Text, joined
from twostroke.services.gateway.tools.formats import FORMATS, choose_format, find_format
from twostroke.services.gateway.tools.grammar import MAX_CALLS, write_grammar
from twostroke.services.gateway.tools.wish import Function, ToolWish

from ....tiny import make_tokenizer
from ....tool_models import TOOL_MODELS

END = 2
TOKENS = {
    "<tool_call>": False, "</tool_call>": False, "[TOOL_CALLS]": True, "[ARGS]": True, "<|python_tag|>": True,
    "<|tool_call|>": True, "<|/tool_call|>": True,
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/few"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"few": {"type": "integer", "minimum": 1, "maximum": 3}},
}
ANSWER: dict[str, Any] = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"],
                          "additionalProperties": False}  # fmt: skip
STRICT = Function("get_weather", {}, SCHEMA, strict=True)
LOOSE = Function("now", {}, {"type": "object", "properties": {}, "additionalProperties": False})
FORMS = [
    ("hermes", ""), ("llama", ""), ("mistral", ""), ("mistral", "[ARGS]"), ("phi4", "functools["),
    ("phi4", "<|tool_call|>"), ("pythonic", ""),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(make_tokenizer(TOKENS))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    return make_vocabulary(tokenizer, tokenizer.vocab_size, [END])


def grammar(tokenizer: Tokenizer, form: str, template: str, wish: ToolWish, **more: Any) -> Constraint:
    def mark(name: str) -> int | None:
        token = tokenizer.token_id(name)
        return token if token in tokenizer.special_ids else None

    return Constraint(ConstraintKind.GRAMMAR, write_grammar(form, template, wish, mark, **more))


def wish(*functions: Function, required: bool = False, single: bool = False) -> ToolWish:
    return ToolWish(tuple({} for _ in functions), functions, required, single)


def allowed(matcher: LLMatcher, size: int) -> list[int]:
    mask = matcher.compute_bitmask()
    return [token for token in range(size) if mask[token // 8] >> token % 8 & 1]


def drawn(matcher: LLMatcher, tokenizer: Tokenizer, seed: int, *, most: int = 400) -> str:
    """A random output, which ends as soon as it may; fails where it does not end."""
    noise = random.Random(seed)
    ids: list[int] = []
    while not matcher.is_stopped() and len(ids) < most:
        tokens = allowed(matcher, tokenizer.vocab_size)
        if END in tokens:
            break
        ids.append(noise.choice(tokens))
        assert matcher.consume_token(ids[-1])
    assert matcher.is_accepting()
    return tokenizer.decode(ids, skip_special=False)


def takes(matcher: LLMatcher, tokenizer: Tokenizer, text: str) -> bool:
    """Whether it is a whole output, each token of it allowed."""
    for token in tokenizer.encode_plain(text):
        if token not in allowed(matcher, tokenizer.vocab_size):
            return False
        matcher.consume_token(token)
    return matcher.is_accepting()


@pytest.mark.parametrize(("form", "template"), FORMS)
def test_what_must_be_called_is_called(tokenizer: Tokenizer, vocabulary: LLTokenizer, form: str, template: str) -> None:
    constraint = grammar(tokenizer, form, template, wish(STRICT, LOOSE, required=True, single=True))
    matcher = compile_grammar(vocabulary, constraint)
    names = set()
    for seed in range(4):
        text = drawn(matcher.deep_copy(), tokenizer, seed)
        parser = FORMATS[form].parser(frozenset({"get_weather", "now"}))
        begun, told, ended = joined(parser.push(text) + parser.flush())
        assert isinstance(begun, CallBegun)
        assert isinstance(told, Arguments)
        assert ended == CallEnded()
        names.add(begun.name)
        arguments = json.loads(told.text)
        if begun.name == "now":
            assert arguments == {}
        else:
            assert arguments in [{"city": city, "days": days} for city in ("Rome", "Oslo") for days in (1, 2, 3)]
    assert names <= {"get_weather", "now"}


ROME, PARIS = '{"city": "Rome", "days": 2}', '{"city": "Paris", "days": 2}'
ROME_CALLED = "city='Rome', days=2"
CALLS = {
    ("hermes", ""): ('<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>', "%s\n%s"),
    ("pythonic", ""): ("[get_weather(%s)]", ""),
    ("llama", ""): ('{"name": "get_weather", "parameters": %s}', "%s; %s"),
    ("mistral", ""): ('[TOOL_CALLS] [{"name": "get_weather", "arguments": %s}]', ""),
    ("mistral", "[ARGS]"): ("[TOOL_CALLS]get_weather[ARGS]%s", "%s%s"),
    ("phi4", "functools["): ('functools[{"name": "get_weather", "arguments": %s}]', ""),
    ("phi4", "<|tool_call|>"): ('<|tool_call|>[{"name": "get_weather", "arguments": %s}]<|/tool_call|>', ""),
}


@pytest.mark.parametrize(("form", "template"), FORMS)
def test_what_may_be_said(tokenizer: Tokenizer, vocabulary: LLTokenizer, form: str, template: str) -> None:
    """As models write it: text or calls, several unless one is wanted, arguments of strict functions as defined."""
    written, several = CALLS[form, template]
    rome, paris = (ROME_CALLED, ROME_CALLED.replace("Rome", "Paris")) if form == "pythonic" else (ROME, PARIS)
    good, bad = written % rome, written % paris
    auto = compile_grammar(vocabulary, grammar(tokenizer, form, template, wish(STRICT)))
    one = compile_grammar(vocabulary, grammar(tokenizer, form, template, wish(STRICT, single=True)))
    must = compile_grammar(vocabulary, grammar(tokenizer, form, template, wish(STRICT, required=True)))
    either = compile_grammar(vocabulary, grammar(tokenizer, form, template, wish(STRICT), answer=ANSWER))
    for matcher in (auto, one, must, either):
        assert takes(matcher.deep_copy(), tokenizer, good)
        assert not takes(matcher.deep_copy(), tokenizer, bad)
    text = 'Well, {"name" or [1] <tool> ... \n'
    for matcher, may in ((auto, True), (one, True), (must, False), (either, False)):
        assert takes(matcher.deep_copy(), tokenizer, text) == may
    assert takes(either.deep_copy(), tokenizer, '{"x": 2}')
    assert not takes(either.deep_copy(), tokenizer, '{"x": 3}')
    assert not takes(must.deep_copy(), tokenizer, '{"x": 2}')
    if form not in ("llama", "pythonic"):
        assert takes(auto.deep_copy(), tokenizer, "Let me see. " + good)
    if several:
        assert takes(auto.deep_copy(), tokenizer, several % (good, good))
        assert takes(must.deep_copy(), tokenizer, several % (good, good))
        assert not takes(one.deep_copy(), tokenizer, several % (good, good))


def test_functions_that_are_not_strict(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    """Are held to their parameters only where a call is forced; what a schema asks for beyond what can be kept is let
    go there, but not of strict ones."""
    odd = {**SCHEMA, "unevaluatedProperties": {"not": {}}}
    loose, strict = Function("get_weather", {}, odd), Function("get_weather", {}, odd, strict=True)
    bad = CALLS["hermes", ""][0] % '{"city": 5}'
    auto = compile_grammar(vocabulary, grammar(tokenizer, "hermes", "", wish(loose, single=True)))
    assert takes(auto, tokenizer, bad)
    must = compile_grammar(vocabulary, grammar(tokenizer, "hermes", "", wish(loose, required=True)))
    assert not takes(must, tokenizer, bad)
    with pytest.raises(InvalidRequest):
        compile_grammar(vocabulary, grammar(tokenizer, "hermes", "", wish(strict)))


def test_calls_are_bounded(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    call = CALLS["hermes", ""][0] % ROME
    matcher = compile_grammar(vocabulary, grammar(tokenizer, "hermes", "", wish(STRICT, required=True)))
    assert takes(matcher.deep_copy(), tokenizer, "\n".join([call] * MAX_CALLS))
    assert not takes(matcher.deep_copy(), tokenizer, "\n".join([call] * (MAX_CALLS + 1)))


def test_a_form_without_a_grammar(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="other") as caught:
        grammar(tokenizer, "other", "", wish(STRICT))
    assert caught.value.field == "tools"


def test_text_is_text(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    """What a parser finds in a text that a grammar lets through is text."""
    auto = compile_grammar(vocabulary, grammar(tokenizer, "llama", "", wish(STRICT)))
    text = '{"title": "get_weather"}'
    assert takes(auto, tokenizer, text)
    parser = FORMATS["llama"].parser(frozenset({"get_weather"}))
    assert joined(parser.push(text) + parser.flush()) == [Text(text)]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        *((model.template, form) for form, model in TOOL_MODELS.items()),
        ("{{ tools }} functools[", "phi4"),
        ("{{ tools }}<|tool|>...<|/tool|> <|tool_call|>", "phi4"),
        ("{{ tools }} [func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ tools }}<tool_call>\n<function=example>", None),
        ("{{ tools }}", None),
    ],
)
def test_a_template_tells_the_form(template: str, form: str | None) -> None:
    found = find_format(template)
    assert (found.name if found is not None else None) == form


def test_who_chooses_the_form() -> None:
    assert choose_format("auto", None) is None
    assert choose_format("none", None) is None
    assert choose_format("hermes", None) is FORMATS["hermes"]
