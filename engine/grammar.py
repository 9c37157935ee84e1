"""A constraint as the grammar library, llguidance, reads it. No torch: the gateway's checks use it too."""

import json
import threading
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..errors import InvalidRequest
from .request import Constraint, ConstraintKind

MAX_TEXT = 256 << 10  # bytes of a constraint's text
MAX_REASON = 300  # characters of the library's own words that are repeated
STACK_BYTES = 64 << 20  # of a thread that compiles: the library's compiler descends recursively
_JSON = {
    "lenient": False,  # what it cannot keep it refuses, whatever a schema's own `x-guidance` asks for
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}",  # without an end some models never stop to make room
}


def check_text(constraint: Constraint) -> None:
    """InvalidRequest (field `constraint`) for a text that is too long, or no text, no JSON, no list of choices."""
    text, kind = constraint.text, constraint.kind
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"a lone surrogate stands at character {error.start}", field="constraint") from error
    if size > MAX_TEXT:
        raise InvalidRequest(f"the constraint has {size} bytes, at most {MAX_TEXT} are taken", field="constraint")
    if "\0" in text:
        raise InvalidRequest("the constraint holds a NUL character", field="constraint")
    if kind is ConstraintKind.JSON_SCHEMA:
        schema = _json(text)
        if not isinstance(schema, dict | bool):
            raise InvalidRequest("a JSON Schema is an object (or true)", field="constraint")
    elif kind is ConstraintKind.CHOICE:
        _choices(text)


def grammar_of(constraint: Constraint) -> str:
    """For `LLMatcher`. InvalidRequest as `check_text`."""
    check_text(constraint)
    text = constraint.text
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return _of_schema('{"type": "object"}')
        case ConstraintKind.JSON_SCHEMA:
            return _of_schema(text)
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(text)
        case ConstraintKind.CHOICE:
            choices = " | ".join(json.dumps(choice) for choice in _choices(text))
            return LLMatcher.grammar_from_lark("start: " + choices)
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(text)


def compile_grammar(vocabulary: LLTokenizer, constraint: Constraint) -> LLMatcher:
    """A matcher at the output's beginning. InvalidRequest (field `constraint`) with the library's reason.

    Takes up to seconds and, for what nobody checked before (`services/gateway/grammar_child.py`), may exhaust the
    stack, which ends the process; frees the interpreter for other threads meanwhile.
    """
    matcher = LLMatcher(vocabulary, grammar_of(constraint), log_level=0, limits=_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first one is the slowest, and tells more
    if matcher.is_error():
        raise InvalidRequest(f"the constraint cannot be used: {reason_of(matcher)}", field="constraint")
    if is_stuck(matcher):
        raise InvalidRequest("the constraint cannot be used: no output satisfies it", field="constraint")
    return matcher


def is_stuck(matcher: LLMatcher) -> bool:
    """Whether nothing may follow although the output is not complete."""
    return matcher.is_stopped() and not matcher.is_accepting()


def reason_of(matcher: LLMatcher) -> str:
    """Why it is in its error state, in one line."""
    text = matcher.get_error()
    if text.startswith("panic"):
        return "it is too large"
    line = " ".join(text.split("<state>")[0].split())
    return line if len(line) <= MAX_REASON else line[:MAX_REASON] + "..."


def in_deep_stack(work: Callable[[], None], name: str, stack: int = STACK_BYTES) -> threading.Thread:
    """Starts `work` on a thread with `stack` bytes of stack, which does not hold up the process's end."""
    before = threading.stack_size(stack)
    try:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


def _limits() -> LLParserLimits:
    """Bounds the work of a mask to tens of milliseconds, and a matcher's memory to tens of megabytes."""
    return LLParserLimits(
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,  # they would hold parts of the output
    )


def _of_schema(text: str) -> str:
    return LLMatcher.grammar_from_json_schema(text, overrides=_JSON)  # type: ignore[arg-type]


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        told = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"the constraint is no valid JSON: {told}", field="constraint") from None


def _choices(text: str) -> list[str]:
    choices = _json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise InvalidRequest("a choice takes a list of texts, none of them empty", field="constraint")
    return [str(each) for each in choices]
