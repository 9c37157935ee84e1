"""Bounded memories of identifiers."""

from hypothesis import given
from hypothesis import strategies as st

from twostroke.kvtransfer.ids import MAX_GAPS, Recent, SeenIds


@given(st.lists(st.integers(-2, 40), max_size=80))
def test_an_id_is_fresh_once(numbers: list[int]) -> None:
    ids, seen = SeenIds(), set()
    for number in numbers:
        assert ids.fresh(number) == (number >= 1 and number not in seen)
        seen.add(number)


@given(st.lists(st.integers(1, 10 * MAX_GAPS), max_size=60))
def test_far_jumps_stay_bounded_and_never_make_an_id_fresh_twice(numbers: list[int]) -> None:
    ids, seen = SeenIds(), set()
    for number in numbers:
        if ids.fresh(number):
            assert number not in seen
        seen.add(number)
        assert len(ids._gaps) <= MAX_GAPS


def test_ids_too_far_below_count_as_seen() -> None:
    ids = SeenIds()
    assert ids.fresh(1 << 62)
    assert ids.fresh((1 << 62) - MAX_GAPS)
    assert not ids.fresh((1 << 62) - MAX_GAPS - 1)
    assert not ids.fresh(1)


def test_recent_keeps_the_latest() -> None:
    recent = Recent(2)
    for item in ("a", "b", "a", "c"):
        recent.add(item)
    assert ("a" in recent, "b" in recent, "c" in recent, len(recent)) == (True, False, True, 2)
    recent.discard("a")
    recent.discard("x")
    assert "a" not in recent
