"""What tenants have taken: all or nothing, and nothing is left of it."""

from hypothesis import given
from hypothesis import strategies as st

from twostroke.services.gateway.ledger import SWEEP, Cost, LocalLedger
from twostroke.services.security.limits import Limits
from twostroke.services.security.tenant import Tenant

S = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def acme(**limits: int) -> Tenant:
    return Tenant("acme", limits=Limits(**limits))


def test_places_are_taken_whole_and_given_back() -> None:
    ledger, tenant = LocalLedger(), acme(max_requests=3)
    assert ledger.acquire(tenant, 2) is None
    assert ledger.acquire(tenant, 2) == ("max_requests", 3, 2, None)
    assert ledger.inside(tenant) == 2
    assert ledger.acquire(tenant, 1) is None
    assert ledger.acquire(Tenant("other"), 100) is None
    ledger.release(tenant, 2)
    assert ledger.acquire(tenant, 2) is None
    ledger.release(tenant, 3)
    ledger.release(Tenant("other"), 100)
    assert ledger.inside(tenant) == ledger.inside(Tenant("other")) == 0


def test_places_count_before_there_is_a_limit() -> None:
    ledger = LocalLedger()
    assert ledger.acquire(acme(), 5) is None
    assert ledger.acquire(acme(max_requests=5), 1) == ("max_requests", 5, 5, None)


def test_a_minute_is_charged_whole_or_not_at_all() -> None:
    clock = Clock()
    ledger, tenant = LocalLedger(clock), acme(requests_per_minute=60, input_tokens_per_minute=600)
    assert ledger.charge(tenant, Cost(1, 600, 5)) is None
    refusal = ledger.charge(tenant, Cost(1, 100, 5))
    assert refusal == ("input_tokens_per_minute", 600, 0, 10.0)
    clock.now = 10 * S - 1
    assert ledger.charge(tenant, Cost(1, 100)) is not None
    clock.now = 10 * S
    assert ledger.charge(tenant, Cost(1, 100)) is None  # refused ones took nothing, neither tokens nor requests
    assert ledger.charge(tenant, Cost(58)) is None


def test_the_longest_wait_is_told() -> None:
    ledger = LocalLedger(Clock())
    tenant = acme(requests_per_minute=60, input_tokens_per_minute=60, output_tokens_per_minute=60)
    assert ledger.charge(tenant, Cost(60, 60, 60)) is None
    assert ledger.charge(tenant, Cost(1, 3, 2)) == ("input_tokens_per_minute", 60, 0, 3.0)


def test_an_estimate_is_corrected() -> None:
    clock = Clock()
    ledger, tenant = LocalLedger(clock), acme(output_tokens_per_minute=60)
    assert ledger.charge(tenant, Cost(output_tokens=50)) is None
    ledger.correct(tenant, Cost(output_tokens=50), Cost(output_tokens=20))
    assert ledger.charge(tenant, Cost(output_tokens=40)) is None
    ledger.correct(tenant, Cost(output_tokens=40), Cost(output_tokens=100))
    assert ledger.charge(tenant, Cost(output_tokens=1)) == ("output_tokens_per_minute", 60, 0, 61.0)


def test_tenants_do_not_share_a_minute() -> None:
    ledger = LocalLedger(Clock())
    limits = Limits(requests_per_minute=1)
    assert ledger.charge(Tenant("a", limits=limits), Cost(1)) is None
    assert ledger.charge(Tenant("b", limits=limits), Cost(1)) is None
    assert ledger.charge(Tenant("a", limits=limits), Cost(1)) is not None


def test_what_is_remembered_of_tenants_is_bounded() -> None:
    clock = Clock()
    ledger, limits = LocalLedger(clock), Limits(requests_per_minute=60)
    for number in range(10 * SWEEP):
        clock.now += S
        assert ledger.charge(Tenant(f"t{number}", limits=limits), Cost(1)) is None
        assert len(ledger._minutes) == len(ledger._tenants) <= SWEEP + 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.booleans()), max_size=60))
def test_places_never_exceed_the_limit_and_none_is_lost(steps: list[tuple[int, int, bool]]) -> None:
    ledger = LocalLedger()
    tenants = [Tenant(f"t{i}", limits=Limits(max_requests=i or None)) for i in range(4)]
    held: list[tuple[int, int]] = []
    for number, places, leave in steps:
        if leave and held:
            tenant, count = held.pop(number % len(held))
            ledger.release(tenants[tenant], count)
        elif ledger.acquire(tenants[number], places) is None:
            held.append((number, places))
        for i, tenant in enumerate(tenants):
            assert ledger.inside(tenant) == sum(count for number, count in held if number == i)
            assert not tenant.limits.max_requests or ledger.inside(tenant) <= tenant.limits.max_requests
    for number, count in held:
        ledger.release(tenants[number], count)
    assert not ledger._places
