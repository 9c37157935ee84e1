"""Tenants are served in rotation, each in its own order."""

from hypothesis import given
from hypothesis import strategies as st

from twostroke.services.gateway.turns_of_tenants import TenantTurns


def test_rotation() -> None:
    turns = TenantTurns[int]()
    for item in range(4):
        turns.add("a", item)
    turns.add("b", 10)
    turns.add("c", 20)
    assert [turns.pop() for _ in range(3)] == [0, 10, 20]
    turns.add("b", 11)
    assert [turns.pop() for _ in range(5)] == [1, 11, 2, 3, None]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "pop", "remove"]), st.integers(0, 30))))
def test_nothing_is_lost_or_served_twice(steps: list[tuple[str, str, int]]) -> None:
    turns, waiting = TenantTurns[int](), dict[str, list[int]]()
    for number, (tenant, what, item) in enumerate(steps):
        if what == "add":
            turns.add(tenant, number)
            waiting.setdefault(tenant, []).append(number)
        elif what == "remove":
            turns.remove(tenant, item)
            waiting[tenant] = [other for other in waiting.get(tenant, []) if other != item]
        else:
            served = turns.pop()
            assert (served is None) == (not any(waiting.values()))
            if served is not None:
                (own,) = [name for name, items in waiting.items() if served in items]
                assert waiting[own].pop(0) == served
        assert all(turns.waiting(name) == len(waiting.get(name, [])) for name in "abc")
