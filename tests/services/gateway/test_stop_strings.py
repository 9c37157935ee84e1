"""Stop strings: what is sent, what is held back, and that cutting the text does not matter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.services.gateway.stop_strings import StopStrings, failure_table


def run(strings: list[str], pieces: list[str]) -> tuple[str, str | None, list[str]]:
    """(all that was sent, the match, what each push gave)."""
    stops = StopStrings(strings)
    sent: list[str] = []
    for piece in pieces:
        text, matched = stops.push(piece)
        sent.append(text)
        if matched is not None:
            return "".join(sent), matched, sent
    sent.append(stops.flush())
    return "".join(sent), None, sent


def plain(strings: list[str], text: str) -> tuple[str, str | None]:
    """The reference: the first match to complete, the longest of those; the text before it."""
    for end in range(1, len(text) + 1):
        matches = [string for string in strings if text[:end].endswith(string)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("strings", "pieces", "sent", "matched"),
    [
        ([], ["ab", "c"], ["ab", "c", ""], None),
        (["END"], ["a", "EN", "D more"], ["a", "", ""], "END"),
        (["END"], ["xE", "Nx"], ["x", "ENx", ""], None),
        (["END"], ["xE", "EN", "D"], ["x", "E", ""], "END"),
        (["aab"], ["aa", "a", "b"], ["", "a", ""], "aab"),
        (["\n\n"], ["a\n", "b\n", "\n"], ["a", "\nb", ""], "\n\n"),
        (["bc", "abcd"], ["ab", "c"], ["", "a"], "bc"),
        (["c", "abc"], ["xab", "c"], ["x", ""], "abc"),
        (["日本"], ["今日", "本"], ["今", ""], "日本"),
        (["🙂"], ["a🙂b"], ["a"], "🙂"),
        (["stop"], ["st"], ["", "st"], None),
    ],
)
def test_table(strings: list[str], pieces: list[str], sent: list[str], matched: str | None) -> None:
    assert run(strings, pieces) == ("".join(sent), matched, sent)


LETTERS = st.text("ab\n", min_size=1, max_size=5)


@given(st.lists(LETTERS, max_size=5), st.lists(st.text("ab\n", max_size=4), max_size=12))
def test_equals_the_reference_however_the_text_is_cut(strings: list[str], pieces: list[str]) -> None:
    sent, matched, _ = run(strings, pieces)
    assert (sent, matched) == plain(strings, "".join(pieces))


@given(st.lists(LETTERS, min_size=1, max_size=4), st.lists(st.text("ab\n", max_size=3), max_size=10))
def test_holds_back_no_more_than_it_must(strings: list[str], pieces: list[str]) -> None:
    stops, text, sent = StopStrings(strings), "", ""
    for piece in pieces:
        safe, matched = stops.push(piece)
        if matched is not None:
            return
        text, sent = text + piece, sent + safe
        held = text[len(sent) :]
        longest = max((n for s in strings for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        assert len(held) == longest


@given(st.text("ab", max_size=12))
def test_failure_table(string: str) -> None:
    def border(prefix: str) -> int:
        return max((n for n in range(1, len(prefix)) if prefix.endswith(prefix[:n])), default=0)

    assert failure_table(string) == [border(string[: i + 1]) for i in range(len(string))]


def plain_from(strings: list[str], text: str, begin: int, include: bool) -> tuple[str, str | None]:
    """As `plain`, for matches that end behind the first `begin` characters."""
    for end in range(begin + 1, len(text) + 1):
        matches = [string for string in strings if text[:end].endswith(string)]
        if matches:
            longest = max(matches, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("ab", max_size=6), max_size=6),
    st.integers(0, 6),
    st.booleans(),
)
def test_matches_count_from_a_place_on(strings: list[str], pieces: list[str], silent: int, include: bool) -> None:
    """Those that end within the first `silent` pieces do not; what was sent by then stays sent."""
    stops = StopStrings(strings, include=include)
    sent, matched = "", None
    for index, piece in enumerate(pieces):
        text, matched = stops.push(piece, counts=index >= silent)
        sent += text
        if matched is not None:
            break
    else:
        sent += stops.flush()
    begin = sum(map(len, pieces[:silent]))
    assert (sent, matched) == plain_from(strings, "".join(pieces), begin, include)
