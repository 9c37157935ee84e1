"""A constraint as the grammar library, llguidance, reads it. No torch: the gateway's checks use it too."""

import json
import threading
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..errors import InvalidRequest
from .constraint_text import check_text, choices_of
from .request import Constraint, ConstraintKind

MAX_REASON = 300  # characters of the library's own words that are repeated
STACK_BYTES = 64 << 20  # of a thread that compiles: the library's compiler descends recursively
_JSON = {
    "lenient": False,  # what it cannot keep it refuses, whatever a schema's own `x-guidance` asks for
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}",  # without an end some models never stop to make room
}


def grammar_of(constraint: Constraint) -> str:
    """For `LLMatcher`. InvalidRequest (field `constraint`) as `check_text`."""
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
            choices = " | ".join(json.dumps(choice) for choice in choices_of(text))
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
    if (reason := problem(matcher)) is not None:
        raise InvalidRequest(f"the constraint cannot be used: {reason}", field="constraint")
    return matcher


def problem(matcher: LLMatcher) -> str | None:
    """Why it cannot go on, in one line; None: it can, or the output is complete."""
    if not matcher.is_stopped() or (matcher.is_accepting() and not matcher.is_error()):
        return None
    text = matcher.get_error()
    if not matcher.is_error() or text.startswith("NoExtension"):
        return "no output satisfies it"
    if text.startswith("panic"):
        return "it is too large"
    line = " ".join(text.partition("<")[0].split() if "<non-verbose" in text else text.split())
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
        max_lexer_states=10_000,
        max_grammar_size=200_000,
        verbose_errors=False,  # they would hold parts of the output
    )


def _of_schema(text: str) -> str:
    return LLMatcher.grammar_from_json_schema(text, overrides=_JSON)  # type: ignore[arg-type]
