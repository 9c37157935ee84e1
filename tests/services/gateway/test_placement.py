"""Where prompts are computed: at the crossing points, before anything is known, and over time in a simulated fleet."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from twostroke.services.gateway.placement import MARGIN, Placement, kv_token_bytes, pair_rates
from twostroke.services.gateway.router import Role, WorkerLoad, choose
from twostroke.v1 import worker_pb2 as pb

RATE = 10_000.0  # tokens a second
P, D = 1, 11


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def worker(role: Role, rate: float | None = RATE, now: float = 0.0, **fields: Any) -> WorkerLoad:
    prefill = role is Role.PREFILL
    defaults: dict[str, Any] = {
        "name": "p0" if prefill else "d0", "incarnation": P if prefill else D, "pages": 10_000, "page_size": 16,
        "max_batch": 64, "max_tokens": 100_000, "free_pages": 10_000, "layers": 10, "kv_token_bytes": 100_000,
        "chunk_tokens": 100,
    }  # fmt: skip
    load = WorkerLoad(role=role, **{**defaults, **fields})
    if rate is not None:
        load.prompt_rate.add(rate * 1000, 1000.0, now)
    return load


def local(p: WorkerLoad, d: WorkerLoad, tokens: int = 1000, own: int | None = None, **more: Any) -> bool:
    placement = more.get("placement") or Placement(Clock())
    return placement.weigh(p, d, tokens, tokens if own is None else own, more.get("moved", 0)).local


def crossing(decide: Callable[[float], bool], low: float, high: float) -> float:
    """Where `decide` turns from False to True."""
    assert not decide(low)
    assert decide(high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if decide(middle) else (middle, high)
    return high


class TestCrossings:
    def test_idle_and_alike_the_prefill_worker_computes(self) -> None:
        assert not local(worker(Role.PREFILL), worker(Role.DECODE))

    def test_a_queue_before_the_prefill_worker(self) -> None:
        """1000 tokens here cost (queue + 1000) there."""
        queue = crossing(lambda q: local(worker(Role.PREFILL, waiting_tokens=int(q)), worker(Role.DECODE)), 0, 10_000)
        assert queue == pytest.approx(1000 / (1 - MARGIN) - 1000, abs=2)

    @pytest.mark.parametrize("streams", [1, 7, 32])
    def test_each_stream_that_would_be_delayed_counts_as_much_as_the_request(self, streams: int) -> None:
        def decide(queue: float) -> bool:
            p = worker(Role.PREFILL, waiting_tokens=int(queue))
            return local(p, worker(Role.DECODE, sequences=streams))

        queue = crossing(decide, 0, 1_000_000)
        assert queue == pytest.approx(1000 * (1 + streams) / (1 - MARGIN) - 1000, abs=2)

    def test_the_steps_that_its_chunks_ride_on(self) -> None:
        """10 chunks of 100 tokens, each in a step of 20 ms, are as long as 2000 tokens."""

        def decide(queue: float) -> bool:
            p = worker(Role.PREFILL, waiting_tokens=int(queue))
            return local(p, worker(Role.DECODE, sequences=1, decode_step_s=0.02))

        queue = crossing(decide, 0, 1_000_000)
        assert queue == pytest.approx((1000 + 2000 + 1000) / (1 - MARGIN) - 1000, abs=2)

    def test_a_queue_of_prompts_at_the_decode_worker(self) -> None:
        def decide(queue: float) -> bool:
            return local(worker(Role.PREFILL, waiting_tokens=int(queue)), worker(Role.DECODE, waiting_tokens=3000))

        assert crossing(decide, 0, 100_000) == pytest.approx(4000 / (1 - MARGIN) - 1000, abs=2)

    def test_what_the_decode_worker_has_cached(self) -> None:
        """It has all but `own` tokens, the prefill worker nothing."""
        own = crossing(lambda saved: local(worker(Role.PREFILL), worker(Role.DECODE), own=1000 - int(saved)), 0, 1000)
        assert own == pytest.approx(1000 * MARGIN, abs=2)

    def test_a_slow_decode_worker(self) -> None:
        def decide(rate: float) -> bool:
            return local(worker(Role.PREFILL, waiting_tokens=1000), worker(Role.DECODE, rate))

        assert crossing(decide, 100, 100_000) == pytest.approx(RATE / 2 / (1 - MARGIN), rel=0.01)

    def test_a_slow_transfer(self) -> None:
        """100 ms of computing; what is waited for beyond that decides."""

        def decide(exposed: float) -> bool:
            placement = Placement(Clock())
            for _ in range(1000):
                placement.transferred(P, D, 100_000_000, exposed)
            return local(worker(Role.PREFILL), worker(Role.DECODE), moved=1000, placement=placement)

        assert crossing(decide, 0.0, 1.0) == pytest.approx(0.1 / (1 - MARGIN) - 0.1, rel=0.01)

    def test_before_a_transfer_was_seen_one_layer_of_it_is_expected_to_show(self) -> None:
        """100 MB in 10 layers: 10 MB are exposed."""

        def decide(slowness: float) -> bool:
            p = worker(Role.PREFILL, pair_rates={D: 1 / slowness})
            return local(p, worker(Role.DECODE), moved=1000)

        exposed = 0.1 / (1 - MARGIN) - 0.1
        assert crossing(decide, 0.01, 100) == pytest.approx(exposed / 0.01, rel=0.01)


class TestUnmeasured:
    def test_nothing_is_measured_yet(self) -> None:
        p, d = worker(Role.PREFILL, None, waiting_tokens=10**9), worker(Role.DECODE, None)
        verdict = Placement(Clock()).weigh(p, d, 1000, 1, 1000)
        assert (verdict.local, verdict.reason) == (False, "computed by p0, as nothing is measured yet")

    @pytest.mark.parametrize("known", [Role.PREFILL, Role.DECODE])
    def test_one_s_rate_stands_for_the_other_s(self, known: Role) -> None:
        p = worker(Role.PREFILL, RATE if known is Role.PREFILL else None, waiting_tokens=200)
        d = worker(Role.DECODE, RATE if known is Role.DECODE else None)
        assert local(p, d)
        p.waiting_tokens = 50
        assert not local(p, d)

    @pytest.mark.parametrize("slow", [Role.PREFILL, Role.DECODE])
    def test_who_was_slow_once_is_tried_again(self, slow: Role) -> None:
        clock = Clock()
        p, d = worker(Role.PREFILL, None), worker(Role.DECODE, None)
        (p if slow is Role.PREFILL else d).prompt_rate.add(100, 1.0, 0.0)
        (d if slow is Role.PREFILL else p).prompt_rate.add(1e6, 100.0, 0.0)
        if slow is Role.DECODE:
            p.waiting_tokens = 2000
        placement = Placement(clock)
        assert placement.weigh(p, d, 1000, 1000, 0).local is (slow is Role.PREFILL)
        clock.now = 200.0
        assert placement.weigh(p, d, 1000, 1000, 0).local is (slow is Role.DECODE)


def test_pairs_are_forgotten_with_their_workers() -> None:
    placement = Placement(Clock())
    for decode in range(10, 110):
        placement.transferred(P, decode, 1, 0.1)
        placement.forget(frozenset({P, decode}))
        assert len(placement) == 1
    placement.forget(frozenset({109}))
    assert len(placement) == 0


def test_the_numbers_are_told() -> None:
    p = worker(Role.PREFILL, waiting_tokens=2000, pair_rates={D: 50.0})
    d = worker(Role.DECODE, sequences=3, decode_step_s=0.01)
    verdict = Placement(Clock()).weigh(p, d, 1000, 500, 1000)
    assert verdict.reason == (
        "computed by d0: p0 would cost 300 ms (queue 200 ms, prefill 100 ms, transfer 0.2 ms of 100 MB at 50 GB/s, 90% "
        "hidden), d0 250 ms (queue 0 ms, prefill 50 ms, steps 50 ms, 3 streams delayed by 50 ms each)"
    )


def test_sizes_and_rates_as_told() -> None:
    form = pb.ModelFormat(kv_dtype="bfloat16", layers=32, num_kv_heads=8, head_dim=128)
    assert kv_token_bytes(form) == 131_072
    told = [pb.PairRate(reader=number, gb_per_s=number - 2.0) for number in range(10)]
    assert pair_rates(told, 4) == {3: 1.0, 4: 2.0, 5: 3.0, 6: 4.0}


def route(p: WorkerLoad, d: WorkerLoad, prompt: int, **options: Any) -> bool:
    """Whether the decode worker does all."""
    chosen = choose([p, d], prompt, 10, {}, weigh=Placement(Clock()).weigh, **options)
    assert chosen is not None
    assert chosen.reason
    return chosen.prefill is None


def test_the_override_comes_before_what_was_measured() -> None:
    busy = worker(Role.DECODE, sequences=60)
    assert not route(worker(Role.PREFILL), busy, 100)
    assert route(worker(Role.PREFILL), busy, 100, local_tokens=100)
    assert not route(worker(Role.PREFILL), busy, 101, local_tokens=100)


@dataclass
class Machine:
    """A worker that computes prompts one after another; a status each second."""

    load: WorkerLoad
    rate: float
    free_at: float = 0.0
    done: list[tuple[float, int]] = field(default_factory=list)  # when, tokens
    told: float = 0.0

    def take(self, now: float, tokens: int) -> float:
        """When it will be computed."""
        self.free_at = max(now, self.free_at) + tokens / self.rate
        self.done.append((self.free_at, tokens))
        return self.free_at

    def report(self, now: float) -> None:
        finished = sum(tokens for at, tokens in self.done if at <= now)
        self.done = [(at, tokens) for at, tokens in self.done if at > now]
        self.load.prompt_rate.add(finished, finished / self.rate, now)
        self.load.waiting_tokens = sum(tokens for _, tokens in self.done)


def simulate(
    load: float, *, seconds: float = 120.0, streams: int = 0, always: bool = False, rates: tuple[float, float] = (1, 1)
) -> tuple[float, float, float]:
    """(mean seconds until a prompt is computed over the last half, share computed at the decode worker, longest queue).

    Poisson arrivals of 500 to 1500 tokens, `load` times what the prefill worker can do. `rates`: of prefill and decode
    worker, by RATE; `streams`: that the decode worker runs all the time.
    """
    clock, dice = Clock(), random.Random(7)
    p = Machine(worker(Role.PREFILL, None), rates[0] * RATE)
    d = Machine(worker(Role.DECODE, None, sequences=streams), rates[1] * RATE)
    placement, waits, locals_, longest, beat = Placement(clock), list[float](), list[bool](), 0.0, 1.0
    while clock.now < seconds:
        clock.now += dice.expovariate(load * p.rate / 1000)
        while beat < clock.now:
            for machine in (p, d):
                machine.report(beat)
            beat += 1.0
        tokens = dice.randrange(500, 1500)
        here = not always and placement.weigh(p.load, d.load, tokens, tokens, tokens).local
        machine = d if here else p
        machine.load.waiting_tokens += tokens
        longest = max(longest, p.free_at - clock.now, d.free_at - clock.now)
        ready = machine.take(clock.now, tokens)
        if clock.now > seconds / 2:
            waits.append(ready - clock.now)
            locals_.append(here)
    return sum(waits) / len(waits), sum(locals_) / len(locals_), longest


class TestOverTime:
    def test_a_light_load_goes_to_the_prefill_worker(self) -> None:
        assert simulate(0.1, streams=4)[1] < 0.02

    def test_what_is_too_much_for_one_is_shared_and_no_queue_grows(self) -> None:
        wait, share, longest = simulate(1.5, streams=4)
        assert 0.2 < share < 0.6
        assert longest < 5.0
        assert wait < simulate(1.5, streams=4, always=True)[0] / 5

    def test_the_more_streams_would_be_delayed_the_later_they_are(self) -> None:
        shares = [simulate(0.9, streams=streams)[1] for streams in (1, 4, 16)]
        assert shares == sorted(shares, reverse=True)
        assert shares[0] > shares[-1]

    def test_twice_the_capacity_starves_neither(self) -> None:
        _, share, longest = simulate(1.9, streams=8)
        assert 0.35 < share < 0.65
        assert longest < 10.0

    def test_the_faster_one_does_more(self) -> None:
        slow, fast = simulate(1.2, streams=1, rates=(1, 0.5))[1], simulate(1.2, streams=1, rates=(1, 2))[1]
        assert slow < fast
