"""What can be told of a constraint without a grammar library."""

import json

from ..errors import InvalidRequest
from .request import Constraint, ConstraintKind

MAX_TEXT = 256 << 10  # bytes of a constraint's text


def check_text(constraint: Constraint) -> None:
    """InvalidRequest (field `constraint`) for a text that is too long, or no text, no JSON, no list of choices."""
    check_size(constraint)
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        if not isinstance(_json(constraint.text), dict | bool):
            raise InvalidRequest("a JSON Schema is an object (or true)", field="constraint")
    elif constraint.kind is ConstraintKind.CHOICE:
        choices_of(constraint.text)
    elif constraint.kind is ConstraintKind.GRAMMAR and not constraint.text.strip():
        raise InvalidRequest("the grammar is empty", field="constraint")


def check_size(constraint: Constraint) -> None:
    """The part of `check_text` that takes no time."""
    text = constraint.text
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"a lone surrogate stands at character {error.start}", field="constraint") from error
    if size > MAX_TEXT:
        raise InvalidRequest(f"the constraint has {size} bytes, at most {MAX_TEXT} are taken", field="constraint")


def choices_of(text: str) -> list[str]:
    """Of a CHOICE. InvalidRequest where it is none."""
    choices = _json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise InvalidRequest("a choice takes a list of texts, none of them empty", field="constraint")
    return [str(each) for each in choices]


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidRequest("the constraint is nested too deeply", field="constraint") from None
    except ValueError as error:
        raise InvalidRequest(f"the constraint is no valid JSON: {error}", field="constraint") from None
