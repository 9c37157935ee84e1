"""Routing: who gets a prompt, by load, prefix and role."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.services.gateway.prefixes import ExpectedPages, prefix_digests
from twostroke.services.gateway.router import (
    Role,
    WorkerLoad,
    choose,
    decode_cost,
    pages_of,
)

PAGE = 16
NUMBERS = {"p0": 1, "p1": 2, "d0": 11, "d1": 12, "b0": 21}
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}


def worker(name: str, **fields: Any) -> WorkerLoad:
    defaults: dict[str, Any] = {"pages": 100, "page_size": PAGE, "max_batch": 8, "max_tokens": 1000, "free_pages": 100}
    return WorkerLoad(name=name, incarnation=NUMBERS[name], role=ROLES[name[0]], **{**defaults, **fields})


def picked(workers: list[WorkerLoad], prompt: int = 100, max_tokens: int = 10, **met: int) -> tuple[str, str] | None:
    """(prefill, decode) by name; the first is empty where one does all."""
    route = choose(workers, prompt, max_tokens, {NUMBERS[name]: pages for name, pages in met.items()})
    if route is None:
        return None
    names = {number: name for name, number in NUMBERS.items()}
    return names[route.prefill] if route.prefill is not None else "", names[route.decode]


PAIR = ["p0", "d0"]


@pytest.mark.parametrize(
    ("workers", "prompt", "max_tokens", "met", "expected"),
    [
        ([], 10, 10, {}, None),
        ([worker("p0")], 10, 10, {}, None),
        ([worker("p0")], 10, 1, {}, ("", "p0")),
        ([worker("d0")], 10, 10, {}, ("", "d0")),
        ([worker("d0")], 10, 1, {}, ("", "d0")),
        ([worker("p0"), worker("d0")], 10, 10, {}, ("p0", "d0")),
        ([worker("p0"), worker("d0")], 10, 1, {}, ("", "p0")),
        ([worker("b0")], 10, 10, {}, ("", "b0")),
        ([worker("b0"), worker("p0")], 10, 10, {}, ("", "b0")),
        ([worker("b0", waiting_tokens=500), worker("p0"), worker("d0")], 10, 10, {}, ("p0", "d0")),
        ([worker("b0"), worker("p0", waiting_tokens=500), worker("d0")], 10, 10, {}, ("", "b0")),
        ([worker("p0", waiting_tokens=5), worker("p1"), worker("d0")], 10, 10, {}, ("p1", "d0")),
        ([worker("p0"), worker("p1"), worker("d0")], 100, 10, {"p1": 6}, ("p1", "d0")),
        ([worker("p0"), worker("p1", waiting_tokens=383), worker("d0")], 100, 10, {"p1": 6}, ("p1", "d0")),
        ([worker("p0"), worker("p1", waiting_tokens=385), worker("d0")], 100, 10, {"p1": 6}, ("p0", "d0")),
        ([worker("p0", draining=True), worker("p1", waiting_tokens=900), worker("d0")], 10, 10, {}, ("p1", "d0")),
        ([worker("p0", draining=True), worker("d0")], 10, 10, {}, ("", "d0")),
        ([worker("p0"), worker("d0", draining=True)], 10, 10, {}, None),
        ([worker("p0"), worker("d0", free_pages=50), worker("d1", free_pages=60)], 100, 10, {}, ("p0", "d1")),
        ([worker("p0"), worker("d0", sequences=3), worker("d1", sequences=2)], 100, 10, {}, ("p0", "d1")),
        ([worker("p0"), worker("d0", free_pages=6), worker("d1", sequences=8)], 100, 10, {}, ("p0", "d1")),
        ([worker("p0"), worker("d0"), worker("d1")], 100, 10, {"d1": 6}, ("p0", "d1")),
        ([worker("p0"), worker("d0"), worker("d1", sequences=4)], 100, 10, {"d1": 6}, ("p0", "d0")),
        ([worker("p0"), worker("d0", max_tokens=109), worker("d1", sequences=8)], 100, 10, {}, ("p0", "d1")),
        ([worker("p0"), worker("d0", max_tokens=109)], 100, 10, {}, None),
        ([worker("p0", max_tokens=100), worker("d0")], 100, 10, {}, ("", "d0")),
    ],
)  # fmt: skip
def test_table(
    workers: list[WorkerLoad], prompt: int, max_tokens: int, met: dict[str, int], expected: tuple[str, str] | None
) -> None:
    assert picked(workers, prompt, max_tokens, **met) == expected


@pytest.mark.parametrize(("free", "met", "start"), [(7, 0, True), (6, 0, False), (6, 1, True), (0, 7, True)])
def test_start_now_if_the_free_pages_cover_the_prompt_and_a_token(free: int, met: int, start: bool) -> None:
    """100 tokens and one more are 7 pages."""
    route = choose([worker("p0"), worker("d0", free_pages=free)], 100, 10, {NUMBERS["d0"]: met})
    assert route is not None
    assert route.start_now is start
    assert route.pages == 7


def test_cold_twins_go_to_one_prefill_worker() -> None:
    workers = [worker("p0"), worker("p1"), worker("d0", pages=10_000, free_pages=10_000)]
    expected = ExpectedPages(1000)
    chosen = []
    for twin in range(64):
        prompt = [*range(960), *range(5000 + twin * 40, 5040 + twin * 40)]
        workers[2].max_tokens = workers[0].max_tokens = workers[1].max_tokens = 4000
        chain = prefix_digests(prompt, PAGE, b"root")
        route = choose(workers, len(prompt), 10, expected.lookup(chain))
        assert route is not None
        assert route.prefill is not None
        expected.record(chain, [route.prefill, route.decode])
        next(w for w in workers if w.incarnation == route.prefill).charge(route.prefill_tokens, route.pages)
        chosen.append(route.prefill)
    assert len(set(chosen)) == 1


def test_prompts_without_a_common_prefix_are_spread() -> None:
    workers = [worker("p0"), worker("p1"), worker("d0")]
    counts = {1: 0, 2: 0}
    for _ in range(20):
        route = choose(workers, 100, 10, {})
        assert route is not None
        assert route.prefill is not None
        workers[route.prefill - 1].charge(route.prefill_tokens, route.pages)
        counts[route.prefill] += 1
    assert counts == {1: 10, 2: 10}


def test_idle_workers_take_turns() -> None:
    workers = [worker("p0"), worker("p1"), worker("d0"), worker("d1")]
    chosen = []
    for _ in range(6):
        route = choose(workers, 100, 10, {})
        assert route is not None
        assert route.prefill is not None
        chosen.append((route.prefill, route.decode))
        for load in workers:
            if load.incarnation in chosen[-1]:
                load.charge(0, 0)
                load.ended(0)
    assert chosen == [(1, 11), (2, 12)] * 3


def test_loads_follow_what_is_sent_and_what_comes_back() -> None:
    load = worker("p0", free_pages=10)
    load.charge(50, 4)
    load.charge(30, 8)
    assert (load.waiting_tokens, load.free_pages, load.sequences) == (80, 0, 2)
    load.prefilled(50)
    load.ended(4)
    assert (load.waiting_tokens, load.free_pages, load.sequences) == (30, 4, 1)
    load.report(free_pages=99, waiting_tokens=7, sequences=3, draining=True)
    load.prefilled(30)
    load.ended(8)
    assert (load.waiting_tokens, load.free_pages, load.sequences, load.draining) == (0, 100, 2, True)


def test_the_reason_names_the_figures() -> None:
    workers = [worker("p0", waiting_tokens=5), worker("p1"), worker("d0"), worker("d1", sequences=4)]
    route = choose(workers, 100, 10, {NUMBERS["p1"]: 2, NUMBERS["d0"]: 6})
    assert route is not None
    assert route.reason == (
        "prefill p1 (32 of 100 tokens cached; costs of 2: p1 -28, p0 105), "
        "decode d0 (96 of 100 tokens cached; costs of 2: d0 -0.24, d1 0.5)"
    )
    alone = choose([worker("d0")], 100, 10, {})
    assert alone is not None
    assert alone.reason == "d0 alone, as no prefill worker is there (0 of 100 tokens cached; costs of 1: d0 100)"


@pytest.mark.parametrize(
    ("local", "met", "expected"), [(0, 6, "p0"), (4, 6, ""), (3, 6, "p0"), (100, 0, ""), (99, 0, "p0")]
)
def test_a_decode_worker_computes_little_itself(local: int, met: int, expected: str) -> None:
    route = choose([worker("p0"), worker("d0")], 100, 10, {NUMBERS["d0"]: met}, local_tokens=local)
    assert route is not None
    assert route.prefill == (NUMBERS["p0"] if expected else None)
    assert route.decode == NUMBERS["d0"]


LOADS = st.builds(
    lambda name, free, waiting, sequences, draining, most: worker(
        name, free_pages=free, waiting_tokens=waiting, sequences=sequences, draining=draining, max_tokens=most
    ),
    st.sampled_from(sorted(NUMBERS)),
    st.integers(0, 100),
    st.integers(0, 5000),
    st.integers(0, 100),
    st.booleans(),
    st.integers(1, 400),
)


@given(
    st.lists(LOADS, max_size=5, unique_by=lambda load: load.name),
    st.integers(1, 200),
    st.integers(1, 200),
    st.dictionaries(st.sampled_from(sorted(NUMBERS.values())), st.integers(0, 20)),
)
def test_every_route_can_be_taken(workers: list[WorkerLoad], prompt: int, max_tokens: int, met: dict[int, int]) -> None:
    route = choose(workers, prompt, max_tokens, met)
    by_number = {load.incarnation: load for load in workers}
    able = [w for w in workers if not w.draining and prompt + max_tokens <= w.max_tokens]
    can = [w for w in able if w.role is not Role.PREFILL or max_tokens == 1]
    assert (route is not None) == bool(can)
    if route is None:
        return
    assert 1 <= route.prefill_tokens <= prompt
    assert route.pages == pages_of(prompt + 1, PAGE)
    decode = by_number[route.decode]
    assert not decode.draining
    assert prompt + max_tokens <= decode.max_tokens
    if route.prefill is not None:
        prefill = by_number[route.prefill]
        assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
        assert not prefill.draining
        least = min(decode_cost(w, prompt, met.get(w.incarnation, 0)) for w in able if w.role is Role.DECODE)
        assert decode_cost(decode, prompt, met.get(decode.incarnation, 0)) == least


def test_several_samples_need_a_wide_worker_and_a_page_each() -> None:
    workers = [worker("p0", max_batch=1), worker("d0", max_batch=3), worker("d1", free_pages=10)]
    route = choose(workers, 100, 10, {}, 4)
    assert route is not None
    assert (route.prefill, route.decode, route.start_now) == (NUMBERS["p0"], NUMBERS["d1"], True)
    assert not choose([workers[0], worker("d1", free_pages=9)], 100, 10, {}, 4).start_now  # type: ignore[union-attr]
    assert choose(workers[:2], 100, 10, {}, 4) is None
    alone = choose([worker("p0", max_batch=4), *workers[1:]], 100, 1, {}, 4)
    assert alone is not None
    assert (alone.prefill, alone.decode) == (None, NUMBERS["p0"])
