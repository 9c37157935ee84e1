"""Python's calls by JSON Schemas: what conforms can be written and is read back, what does not cannot be."""

import json
import random
from typing import Any

import jsonschema_rs
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from twostroke.engine.grammar import _limits
from twostroke.services.gateway.tools.events import Arguments, CallBegun, CallEnded, joined
from twostroke.services.gateway.tools.grammar import MAX_CALLS, write_grammar
from twostroke.services.gateway.tools.pythonic import PythonicParser
from twostroke.services.gateway.tools.wish import Function, ToolWish

BYTES = LLTokenizer("byte")
END = BYTES.eos_token


def matcher(schema: dict[str, Any], *, strict: bool = True, required: bool = True, single: bool = True) -> LLMatcher:
    wish = ToolWish(({},), (Function("f", {}, schema, strict),), required, single)
    grammar = LLMatcher.grammar_from_lark(write_grammar("pythonic", "", wish, lambda _: None))
    told = LLMatcher(BYTES, grammar, log_level=0, limits=_limits())
    assert not told.is_error(), told.get_error()
    return told


def takes(start: LLMatcher, text: str) -> bool:
    following, tokens = start.deep_copy(), list(text.encode())
    return following.try_consume_tokens(tokens) == len(tokens) and following.is_accepting()


def read(text: str) -> dict[str, Any]:
    parser = PythonicParser(frozenset({"f"}))
    begun, told, ended = joined(parser.push(text) + parser.flush())
    assert (begun, ended) == (CallBegun("f"), CallEnded())
    assert isinstance(told, Arguments)
    return json.loads(told.text)  # type: ignore[no-any-return]


# Schemas, and for each values that conform or nearly do

NAMES = st.sampled_from(["a", "b", "from", "start-date", "ab", 'it"s', "é"])
ARGUMENTS = st.sampled_from(["a", "b", "from", "start-date", "ab", "é"])
TEXTS = st.text(st.characters(exclude_categories=["Cs"], max_codepoint=0x1F64F), max_size=5)
ODD = st.none() | st.booleans() | st.integers(-9, 9) | TEXTS | st.sampled_from([[], {}, [1], 0.5])


@st.composite
def scalars(draw: st.DrawFn) -> tuple[dict[str, Any], st.SearchStrategy[Any]]:
    match draw(st.integers(0, 6)):
        case 0:
            return {"type": "boolean"}, st.booleans()
        case 1:
            return {"type": ["integer", "null"]}, st.integers(-(10**12), 10**12) | st.none()
        case 2:
            low = draw(st.integers(-20, 20))
            return {"type": "integer", "minimum": low, "maximum": low + 7}, st.integers(low - 1, low + 8)
        case 3:
            return {"type": "number", "exclusiveMinimum": 0}, st.integers(0, 9).map(lambda n: n + 0.25)
        case 4:
            values = draw(
                st.lists(TEXTS | st.integers() | st.none() | st.just([1, {"x": "y"}]), min_size=1, max_size=3)
            )
            return {"enum": values}, st.sampled_from(values)
        case 5:
            least = draw(st.integers(0, 2))
            return {"type": "string", "minLength": least, "maxLength": least + 2}, TEXTS
    return {"type": "string"}, TEXTS


@st.composite
def objects(
    draw: st.DrawFn, inner: st.SearchStrategy[Any], names: st.SearchStrategy[str]
) -> tuple[dict[str, Any], st.SearchStrategy[Any]]:
    some = draw(st.dictionaries(names, inner, max_size=3))
    required = [name for name in some if draw(st.booleans())]
    other = draw(st.booleans())
    schema = {
        "type": "object",
        "properties": {name: schema for name, (schema, _) in some.items()},
        "required": required,
        "additionalProperties": {"type": "boolean"} if other else False,
    }
    more = {"zz": st.booleans()} if other else {}
    optional = {name: value for name, (_, value) in some.items() if name not in required} | more
    conforming = st.fixed_dictionaries({name: some[name][1] for name in required}, optional=optional)
    order = [*some, *more]
    return schema, conforming.map(lambda value: {name: value[name] for name in order if name in value})


@st.composite
def lists(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> tuple[dict[str, Any], st.SearchStrategy[Any]]:
    schema, value = draw(inner)
    least = draw(st.integers(0, 2))
    told = {"type": "array", "items": schema, "minItems": least, "maxItems": least + 1}
    return told, st.lists(value, max_size=4)


@st.composite
def either(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> tuple[dict[str, Any], st.SearchStrategy[Any]]:
    (one, first), (other, second) = draw(inner), draw(inner)
    return {"anyOf": [one, other]}, first | second


SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    scalars(), lambda inner: objects(inner, NAMES) | lists(inner) | either(inner), max_leaves=4
)


def python(value: Any, noise: random.Random) -> str:
    """As some model might write it."""
    comma, colon = noise.choice([", ", ","]), noise.choice([": ", ":"])
    match value:
        case str():
            quote = noise.choice("\"'")
            return quote + "".join(character(each, quote, noise) for each in value) + quote
        case list():
            return f"[{comma.join(python(each, noise) for each in value)}]"
        case dict():
            pairs = (f"{python(key, noise)}{colon}{python(each, noise)}" for key, each in value.items())
            return "{" + comma.join(pairs) + "}"
    return repr(value)


def character(each: str, quote: str, noise: random.Random) -> str:
    if each in (quote, "\\"):
        return "\\" + each
    if each >= " ":
        return each
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(each) or f"\\u{ord(each):04x}"


def written(arguments: dict[str, Any], noise: random.Random) -> str:
    return (
        f"[f({noise.choice([', ', ',']).join(f'{name}={python(value, noise)}' for name, value in arguments.items())})]"
    )


@settings(max_examples=150, deadline=None)
@given(objects(SCHEMAS, ARGUMENTS), st.data())
def test_what_conforms_can_be_written_and_nothing_else(made: Any, data: st.DataObject) -> None:
    schema, values = made
    arguments = data.draw(values)
    if data.draw(st.booleans()) and arguments:  # spoilt, or so it may be
        arguments[data.draw(st.sampled_from(sorted(arguments)))] = data.draw(ODD)
    noise = random.Random(data.draw(st.integers(0, 99)))
    text = written(arguments, noise)
    assert read(text) == arguments
    assert takes(matcher(schema), text) == jsonschema_rs.is_valid(schema, arguments), (schema, text)


def drawn(start: LLMatcher, seed: int, *, most: int = 3000) -> str:
    """A random output, which ends as soon as it may."""
    following, noise, output = start.deep_copy(), random.Random(seed), bytearray()
    while not following.is_accepting():
        mask = following.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        closing = [byte for byte in allowed if byte in b"\"'])},"]  # a long text has nothing to tell
        output.append(noise.choice(closing if closing and noise.random() < 0.4 else allowed))
        assert following.consume_token(output[-1])
        assert len(output) < most
    return output.decode()


@settings(max_examples=40, deadline=None)
@given(objects(SCHEMAS, ARGUMENTS), st.integers(0, 99))
def test_whatever_is_drawn_is_a_call_that_conforms(made: Any, seed: int) -> None:
    schema, _ = made
    text = drawn(matcher(schema), seed)
    jsonschema_rs.validate(schema, read(text))


def test_forced_allowed_and_single_calls() -> None:
    one = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "additionalProperties": False}
    must = matcher(one, single=False)
    assert takes(must, f"[{', '.join(['f(a=1)'] * MAX_CALLS)}]")
    assert not takes(must, f"[{', '.join(['f(a=1)'] * (MAX_CALLS + 1))}]")
    for text in ("[]", "Well.", "[f(a=3)]", "[g()]", "f(a=1)", "[f(a=1)", ""):
        assert not takes(must, text)
    assert not takes(matcher(one), "[f(), f()]")
    may = matcher(one, required=False)
    for text in ("[f(a=1)]", "[ f()]", "Well.", "[1, 2]", "[fa", "f(a=3)"):
        assert takes(may, text)
    assert not takes(may, "[f(a=3)]")
    loose = matcher(one, strict=False, required=False)
    assert takes(loose, "[f(a=3, b={'x': [None]})]")


def test_llama_4_s_own_marks() -> None:
    """They are special tokens, which text has not."""
    wish = ToolWish(({},), (Function("f", {}, {}),), required=True)
    marks = {"<|python_start|>": 300, "<|python_end|>": 301}
    assert 'start: <[300]>? "[" call' in write_grammar("pythonic", "", wish, marks.get)
    assert '"]" <[301]>?' in write_grammar("pythonic", "", wish, marks.get)
