"""JSON is followed character by character: what Python reads is whole just at its end, the rest is malformed."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.services.gateway.tools.json_scanner import MAX_DEPTH, Fed, JsonScanner, Malformed

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=5,
)
SPACES = st.sampled_from([None, 0, 2])


def whole(text: str) -> bool:
    """Whether `text` is a value, and nothing before its end is."""
    scanner = JsonScanner()
    fed = Fed.MORE
    for character in text:
        if fed is not Fed.MORE:
            return False
        fed = scanner.feed(character)
    return fed is Fed.WHOLE


def is_json(text: str) -> bool:
    """As Python has it, which also takes NaN and the like; no text here can hold these."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.text(), VALUES) | st.lists(VALUES), SPACES, st.booleans())
def test_objects_and_arrays_end_with_their_bracket(value: Any, indent: int | None, ascii_only: bool) -> None:
    assert whole(json.dumps(value, indent=indent, ensure_ascii=ascii_only))


@settings(deadline=None)
@given(st.text(alphabet='{}[]",:.-+eE0123456789tfn\\u \n', max_size=12))
def test_what_is_no_json_is_told(text: str) -> None:
    """Everything that begins like an object or array: followed to a whole value just where Python reads one."""
    text = "[" + text
    scanner = JsonScanner()
    for index, character in enumerate(text, 1):
        try:
            fed = scanner.feed(character)
        except Malformed:
            assert not is_json(text)
            return
        if fed is Fed.WHOLE:
            assert is_json(text[:index])
            return
    assert not is_json(text)


@pytest.mark.parametrize(
    "text",
    ["[01 ", "[1.]", "[.", "[1e]", "[-]", "[trx", "[nul}", '["\n', '["\\x', '["\\u00g', "{1", "{,", '{"a",', "[,",
     "[1,]", "[1 2", "{]", "[}", "]", "[N", "[I", "[+", "['", " ", "[" * (MAX_DEPTH + 1)],
)  # fmt: skip
def test_refused_at_the_first_wrong_character(text: str) -> None:
    scanner = JsonScanner()
    for character in text[:-1]:
        assert scanner.feed(character) is Fed.MORE
    with pytest.raises(Malformed):
        scanner.feed(text[-1])


@pytest.mark.parametrize("text", ["0", "-1.5e+3", "12"])
def test_a_number_ends_before_what_follows(text: str) -> None:
    scanner = JsonScanner()
    assert {scanner.feed(character) for character in text} == {Fed.MORE}
    assert scanner.feed(",") is Fed.BEFORE
