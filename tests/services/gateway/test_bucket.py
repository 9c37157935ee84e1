"""A limit a minute: exact, compared with GCRA as its definition has it, in fractions."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from twostroke.services.gateway.bucket import MINUTE_NS, Bucket


class Reference:
    """Virtual scheduling, the other form of the same algorithm: a theoretical arrival time."""

    def __init__(self) -> None:
        self.tat = Fraction(0)

    def wait(self, amount: int, per_minute: int, now: int) -> Fraction:
        increment = Fraction(MINUTE_NS, per_minute)
        return max(Fraction(0), max(self.tat, Fraction(now)) + min(amount, per_minute) * increment - MINUTE_NS - now)

    def add(self, amount: int, per_minute: int, now: int) -> None:
        increment = Fraction(MINUTE_NS, per_minute)
        self.tat = max(max(self.tat, Fraction(now)) + amount * increment, Fraction(now))


events = st.lists(
    st.tuples(st.integers(0, 2 * MINUTE_NS), st.integers(-300, 300).filter(bool), st.booleans()),
    min_size=1,
    max_size=30,
)


@given(st.integers(1, 250), events)
def test_it_is_gcra(per_minute: int, happened: list[tuple[int, int, bool]]) -> None:
    bucket, reference, now = Bucket(), Reference(), 0
    for passed, amount, forced in happened:
        now += passed
        wait = bucket.wait_ns(max(0, amount), per_minute, now)
        exact = reference.wait(max(0, amount), per_minute, now)
        assert wait == -(-exact // 1)
        if amount > 0 and wait and not forced:
            before = bucket.content
            assert bucket.wait_ns(amount, per_minute, now + wait - 1) > 0  # a nanosecond earlier it is too early
            assert before >= bucket.content
            now += wait
            assert bucket.wait_ns(amount, per_minute, now) == 0
        bucket.add(amount, per_minute, now)
        reference.add(amount, per_minute, now)


def test_a_minute_at_once_then_evenly() -> None:
    bucket = Bucket()
    assert bucket.wait_ns(60, 60, 0) == 0
    bucket.add(60, 60, 0)
    assert bucket.wait_ns(1, 60, 0) == 1_000_000_000
    assert bucket.wait_ns(30, 60, 10_000_000_000) == 20_000_000_000
    assert bucket.wait_ns(10, 60, 10_000_000_000) == 0


def test_more_than_a_minute_holds_goes_into_debt() -> None:
    bucket = Bucket()
    assert bucket.wait_ns(90, 60, 0) == 0
    bucket.add(90, 60, 0)
    assert bucket.wait_ns(1, 60, 0) == 31_000_000_000
    assert bucket.wait_ns(90, 60, 0) == 90_000_000_000  # when it is empty


def test_what_is_taken_back_is_at_most_what_is_there() -> None:
    bucket = Bucket()
    bucket.add(30, 60, 0)
    bucket.add(-30, 60, 15_000_000_000)
    assert bucket.empty(60, 15_000_000_000)
    bucket.add(60, 60, 15_000_000_000)
    assert bucket.wait_ns(1, 60, 15_000_000_000) == 1_000_000_000


def test_a_changed_limit_keeps_what_was_taken() -> None:
    bucket = Bucket()
    bucket.add(60, 60, 0)
    assert bucket.wait_ns(1, 120, 0) == 0
    assert bucket.wait_ns(120, 120, 0) == 30_000_000_000
    assert bucket.wait_ns(1, 30, 0) == 62_000_000_000


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    bucket = Bucket()
    bucket.add(60, 60, 5_000_000_000)
    assert bucket.wait_ns(1, 60, 4_000_000_000) == bucket.wait_ns(1, 60, 5_000_000_000) == 1_000_000_000
