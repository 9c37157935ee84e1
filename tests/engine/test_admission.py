"""Who gets pages, when, and who must wait or make room: order, reserve, watermark, sharing, tickets."""

import pytest

from twostroke.engine.output_length import FIRST_ESTIMATE, OutputLength
from twostroke.engine.request import SequenceKey, Work
from twostroke.engine.sequence import State

from .fake_engine import FakeEngine, prompt_of


def states(engine: FakeEngine, *keys: SequenceKey) -> list[State | None]:
    return [engine.core.state_of(key) for key in keys]


class TestOrder:
    def test_first_come_first_served_up_to_max_batch(self) -> None:
        engine = FakeEngine(max_batch=2)
        keys = [engine.add(number, prompt_of(5, number), max_tokens=3 + number) for number in range(4)]
        engine.step()
        assert states(engine, *keys) == [State.RUNNING] * 2 + [State.WAITING] * 2
        engine.drain()
        assert list(engine.ends) == keys

    def test_a_large_one_that_does_not_fit_is_not_overtaken(self) -> None:
        engine = FakeEngine(pages=11)
        first = engine.add(1, prompt_of(20), max_tokens=8)
        large = engine.add(2, prompt_of(24, 1), max_tokens=2)
        small = engine.add(3, prompt_of(3, 2), max_tokens=1)
        engine.step()
        assert states(engine, first, large, small) == [State.RUNNING, State.WAITING, State.WAITING]
        engine.drain()
        assert next(iter(engine.ends)) == first
        engine.check_outputs()

    def test_preempted_ones_come_before_new_ones_of_any_age(self) -> None:
        engine = FakeEngine(pages=7, max_batch=8)
        old = engine.add(1, prompt_of(8), max_tokens=12)
        young = engine.add(2, prompt_of(8, 1), max_tokens=12)
        engine.run_until(lambda: bool(engine.preempted))
        new = engine.add(3, prompt_of(3, 2), max_tokens=1, arrival=engine.clock() - 50)
        engine.run_until(lambda: old in engine.ends)
        assert states(engine, young, new) == [State.WAITING, State.WAITING], "it would fit, but is not first"
        engine.run_until(lambda: new in engine.ends)
        assert len(engine.outputs[young]) > 4, "went on before"
        engine.drain()
        engine.check_outputs()

    def test_the_most_urgent_is_admitted_first(self) -> None:
        engine = FakeEngine(pages=200, max_batch=1)
        running = engine.add(1, prompt_of(4), max_tokens=6)
        engine.step()
        waiting = {
            n: engine.add(n, prompt_of(4, n), max_tokens=2, priority=p) for n, p in ((2, 5), (3, 0), (4, 0), (5, -3))
        }
        engine.drain()
        assert list(engine.ends) == [running, *(waiting[number] for number in (5, 3, 4, 2))]
        engine.check_outputs()

    def test_the_most_urgent_reservation_is_made_first(self) -> None:
        engine = FakeEngine(max_batch=1)
        running = engine.add(1, prompt_of(5), max_tokens=4)
        engine.step()
        late, urgent = (
            engine.add(number, prompt_of(5, number), Work.DECODE, writer=9, priority=priority)
            for number, priority in ((2, 0), (3, -1))
        )
        engine.run_until(lambda: running in engine.ends)
        engine.step()
        assert states(engine, urgent, late) == [State.AWAITING, State.WAITING]
        engine.core.cancel(urgent)
        engine.step()
        assert states(engine, late) == [State.AWAITING]

    def test_held_sequences_take_no_place_in_the_batch(self) -> None:
        engine = FakeEngine(max_batch=1)
        keys = [engine.add(number, prompt_of(5, number), Work.PREFILL) for number in range(3)]
        engine.drain()
        assert states(engine, *keys) == [State.HELD] * 3

    def test_awaiting_sequences_do(self) -> None:
        engine = FakeEngine(max_batch=2)
        keys = [engine.add(number, prompt_of(5, number), Work.DECODE, writer=9) for number in range(3)]
        engine.drain()
        assert states(engine, *keys) == [State.AWAITING, State.AWAITING, State.WAITING]
        engine.core.cancel(keys[0])
        engine.core.pool.unhold(("ticket", keys[0]))
        engine.step()
        assert states(engine, keys[2]) == [State.AWAITING]


class TestReserve:
    @pytest.mark.parametrize(
        ("reserve", "pages"), [("prompt", 3), ("expected", -(-(8 + FIRST_ESTIMATE) // 4)), ("max", -(-(8 + 199) // 4))]
    )
    def test_pages_set_aside(self, reserve: str, pages: int) -> None:
        engine = FakeEngine(pages=100, reserve=reserve)
        engine.add(1, prompt_of(8), max_tokens=200)
        engine.step()
        assert engine.core.pool.usable - engine.core.pool.free_pages == pages

    @pytest.mark.parametrize("reserve", ["prompt", "expected", "max"])
    @pytest.mark.parametrize("work", [Work.ALL, Work.PREFILL])
    def test_never_more_than_can_be_filled(self, reserve: str, work: Work) -> None:
        engine = FakeEngine(pages=100, reserve=reserve)
        engine.add(1, prompt_of(8), work, max_tokens=1)
        engine.core.step()
        assert engine.core.pool.free_pages >= engine.core.pool.usable - 2

    def test_with_max_nobody_is_ever_preempted(self) -> None:
        engine = FakeEngine(pages=16, reserve="max")
        for number in range(8):
            engine.add(number, prompt_of(5 + number, number), max_tokens=20)
        engine.drain()
        assert (len(engine.ends), engine.preempted) == (8, [])

    def test_the_expectation_follows_what_was_seen(self) -> None:
        length = OutputLength()
        assert length.expected() == FIRST_ESTIMATE
        length.observe(10)
        assert length.expected() == 10
        length.observe(21)
        assert length.expected() == 16
        for _ in range(1000):
            length.observe(300)
        assert length.expected() == 300

    def test_expected_counts_what_was_answered_before(self) -> None:
        engine = FakeEngine(pages=100, reserve="expected")
        engine.add(1, prompt_of(8), max_tokens=12, stop_token_ids=())
        engine.drain()  # outputs of 12 are expected from now on
        engine.add(2, prompt_of(8, 1), max_tokens=100, output_ids=prompt_of(8, 3))
        engine.step()
        assert engine.core.pool.usable - engine.core.pool.free_pages == (8 + 8 + 4) // 4


class TestWatermark:
    def test_room_to_grow_is_kept_at_admission(self) -> None:
        engine = FakeEngine(pages=11, watermark=0.2)
        first = engine.add(1, prompt_of(19), max_tokens=2)
        second = engine.add(2, prompt_of(15, 1), max_tokens=2)
        engine.step()
        assert states(engine, first, second) == [State.RUNNING, State.WAITING], "4 of 5 free pages would leave 1, not 2"
        engine.drain()
        assert len(engine.ends) == 2

    def test_not_when_nothing_runs(self) -> None:
        engine = FakeEngine(pages=11, watermark=0.5)
        engine.add(1, prompt_of(39), max_tokens=1)
        engine.drain()
        assert len(engine.ends) == 1


class TestSharing:
    def test_cold_twins_cost_one_prefill(self) -> None:
        engine = FakeEngine(pages=200, token_budget=16, max_batch=64)
        prompt = prompt_of(40)
        keys = [engine.add(number, [*prompt, number], max_tokens=1) for number in range(32)]
        engine.drain()
        assert len(engine.ends) == 32
        assert engine.runner.tokens_run == 40 + 32
        engine.check_outputs()
        cached = [engine.ends[key].timings.cached_tokens for key in keys]  # type: ignore[union-attr]
        assert cached == [0] + [40] * 31

    def test_a_computing_hit_leaves_the_last_token(self) -> None:
        engine = FakeEngine()
        for number in range(2):
            engine.add(number, prompt_of(8), max_tokens=3)
            engine.drain()
        first = next(step[0] for step in engine.runner.steps if step[0][0] == engine.key(1))
        assert first[1:] == (4, 4), "8 tokens are cached, but the last page is run again for its logits"
        engine.check_outputs()

    def test_output_pages_are_found_too(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(6), max_tokens=11)
        engine.drain()
        more = engine.add(2, [*prompt_of(6), *engine.outputs[key], 3], max_tokens=2)
        engine.drain()
        assert engine.firsts[more].timings.cached_tokens == 16  # type: ignore[union-attr]
        engine.check_outputs()

    def test_another_salt_shares_nothing(self) -> None:
        engine = FakeEngine()
        engine.add(1, prompt_of(16), max_tokens=1)
        other = engine.add(2, prompt_of(16), max_tokens=1, cache_salt=b"tenant")
        engine.drain()
        assert engine.firsts[other].timings.cached_tokens == 0  # type: ignore[union-attr]
        assert engine.runner.tokens_run == 32

    def test_without_the_cache_nothing_is_shared_or_kept(self) -> None:
        engine = FakeEngine(prefix_cache=False)
        for number in range(2):
            engine.add(number, prompt_of(16), max_tokens=2)
        engine.drain()
        assert engine.runner.tokens_run == 34
        assert engine.core.pool.cached == 0
        engine.check_outputs()

    def test_if_the_first_twin_is_cancelled_the_next_computes(self) -> None:
        engine = FakeEngine(token_budget=8)
        a, b, c = (engine.add(number, prompt_of(33), max_tokens=2) for number in range(3))
        engine.step()
        engine.step()
        assert states(engine, a, b, c) == [State.RUNNING, State.WAITING, State.WAITING]
        engine.core.cancel(a)
        engine.step()
        assert states(engine, b, c) == [State.RUNNING, State.WAITING]
        assert engine.runner.steps[-1] == [(b, 16, 8)], "what the first one finished is used"
        engine.drain()
        assert list(engine.ends) == [b, c]
        engine.check_outputs()

    def test_if_the_first_twins_step_fails_the_next_computes(self) -> None:
        engine = FakeEngine(token_budget=8)
        a, b = (engine.add(number, prompt_of(20), max_tokens=2) for number in range(2))
        engine.step()
        engine.runner.fail_with = RuntimeError("out of memory")
        assert engine.step().failures[0][0] == a
        engine.drain()
        assert list(engine.ends) == [b]
        engine.check_outputs()
        engine.core.check_integrity(idle=True)

    def test_others_pass_a_waiting_twin(self) -> None:
        engine = FakeEngine(token_budget=8)
        a, b = (engine.add(number, prompt_of(40), max_tokens=2) for number in range(2))
        other = engine.add(3, prompt_of(3, 1), max_tokens=1)
        engine.step()
        assert states(engine, a, b) == [State.RUNNING, State.WAITING]
        assert other in engine.ends

    def test_a_longer_twin_starts_when_the_common_part_is_there(self) -> None:
        engine = FakeEngine(token_budget=8)
        engine.add(1, [*prompt_of(8), *prompt_of(24, 1)], max_tokens=1)
        longer = engine.add(2, [*prompt_of(8), *prompt_of(24, 2)], max_tokens=1)
        engine.step()
        engine.step()
        assert states(engine, longer) == [State.RUNNING]
        assert engine.firsts == {}
        engine.drain()
        assert engine.runner.tokens_run == 8 + 24 + 24

    def test_decode_twins_of_one_writer_share_a_transfer(self) -> None:
        engine = FakeEngine(max_batch=8)
        a, b = (engine.add(number, prompt_of(10), Work.DECODE, writer=5, max_tokens=3) for number in range(2))
        other = engine.add(3, prompt_of(10), Work.DECODE, writer=6, max_tokens=3)
        engine.drain()
        assert states(engine, a, b, other) == [State.AWAITING, State.WAITING, State.AWAITING]
        engine.arrive(a)
        engine.step()
        assert states(engine, b) == [State.AWAITING]
        assert (len(engine.reserved[a].pages), engine.reserved[a].first_position) == (3, 0)
        assert (len(engine.reserved[b].pages), engine.reserved[b].first_position) == (1, 8)
        engine.arrive(b)
        engine.arrive(other)
        engine.drain()
        assert len(engine.ends) == 3
        engine.check_outputs()
        engine.core.check_integrity(idle=True)

    def test_pages_in_transit_keep_no_local_sequence_waiting(self) -> None:
        engine = FakeEngine(max_batch=8)
        remote = engine.add(1, prompt_of(10), Work.DECODE, writer=5)
        engine.step()
        local = engine.add(2, prompt_of(10), max_tokens=2)
        engine.drain()
        assert local in engine.ends
        engine.arrive(remote)
        engine.drain()
        engine.check_outputs()

    def test_pages_under_computation_keep_no_decode_sequence_waiting(self) -> None:
        engine = FakeEngine(token_budget=4, max_batch=3)
        engine.add(1, prompt_of(20), max_tokens=2)
        engine.step()
        remote = engine.add(2, prompt_of(20), Work.DECODE, writer=5)
        engine.step()
        assert states(engine, remote) == [State.AWAITING]
        assert engine.reserved[remote].first_position == 4, "what is cached by then is used"

    def test_when_the_first_decode_twin_is_lost_the_next_is_reserved(self) -> None:
        engine = FakeEngine(max_batch=8)
        a, b = (engine.add(number, prompt_of(10), Work.DECODE, writer=5, max_tokens=3) for number in range(2))
        engine.step()
        engine.core.cancel(a)
        engine.step()
        assert states(engine, b) == [State.AWAITING]
        assert engine.core.pool.quarantined == 3
        assert set(engine.reserved[a].pages).isdisjoint(engine.reserved[b].pages)

    def test_a_wholly_cached_decode_prompt_still_awaits_token_0(self) -> None:
        engine = FakeEngine()
        engine.add(1, prompt_of(8), max_tokens=1)
        engine.drain()
        key = engine.add(2, prompt_of(8), Work.DECODE, writer=5, max_tokens=4)
        result = engine.step()
        assert [(r.key, r.pages, r.first_position) for r in result.reserved] == [(key, [], 8)]
        assert result.progress
        engine.arrive(key)
        engine.drain()
        engine.check_outputs()
        assert engine.outputs[key] == engine.expected(key)

    def test_eviction_between_twins_costs_only_time(self) -> None:
        engine = FakeEngine(pages=12, max_batch=2)
        for number in range(12):
            engine.add(number, prompt_of(17, number % 3), max_tokens=3)
        engine.drain()
        assert len(engine.ends) == 12
        engine.check_outputs()


class TestTickets:
    def test_one_that_must_not_start_waits_for_its_ticket(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(8), Work.PREFILL, start_now=False)
        assert not engine.core.has_work()
        engine.core.ticketed(key)
        assert engine.core.has_work()
        engine.drain()
        assert states(engine, key) == [State.HELD]

    def test_ticketed_ones_go_first(self) -> None:
        engine = FakeEngine(max_batch=1)
        early, late = (engine.add(number, prompt_of(8, number), Work.PREFILL) for number in range(2))
        engine.core.ticketed(late)
        engine.drain()
        assert list(engine.firsts) == [late, early]

    def test_unticketed_ones_hold_a_bounded_share(self) -> None:
        engine = FakeEngine(pages=21, unticketed_share=0.5)
        keys = [engine.add(number, prompt_of(14, number), Work.PREFILL) for number in range(4)]
        engine.drain()
        assert states(engine, *keys) == [State.HELD] * 2 + [State.WAITING] * 2
        engine.core.ticketed(keys[0])
        engine.drain()
        assert states(engine, *keys) == [State.HELD] * 3 + [State.WAITING]
        engine.core.release(keys[1])
        engine.drain()
        assert states(engine, *keys) == [State.HELD, None, State.HELD, State.HELD]

    def test_one_larger_than_the_share_starts_with_its_ticket(self) -> None:
        engine = FakeEngine(pages=21, unticketed_share=0.5)
        key = engine.add(1, prompt_of(60), Work.PREFILL)
        assert engine.drain() == 0
        engine.core.ticketed(key)
        engine.drain()
        assert states(engine, key) == [State.HELD]

    def test_a_ticketed_one_takes_pages_of_the_youngest_unticketed(self) -> None:
        engine = FakeEngine(pages=21, unticketed_share=0.9)
        keys = [engine.add(number, prompt_of(16, number), Work.PREFILL) for number in range(4)]
        engine.drain()
        large = engine.add(9, prompt_of(31, 9), Work.PREFILL, start_now=False)
        engine.core.ticketed(large)
        engine.drain()
        assert states(engine, large) == [State.HELD]
        assert engine.preempted == [keys[3]], "one is enough: 4 free pages and its 4"
        assert states(engine, *keys) == [State.HELD] * 3 + [State.WAITING]
        engine.core.release(large)
        engine.drain()
        assert states(engine, keys[3]) == [State.HELD]
        assert all(len(engine.outputs[key]) == 1 for key in keys), "each token 0 once"
        engine.check_outputs()

    def test_the_recompute_runs_the_hook_again(self) -> None:
        engine = FakeEngine(pages=11, unticketed_share=1.0)
        young = engine.add(1, prompt_of(16), Work.PREFILL)
        engine.drain()
        large = engine.add(2, prompt_of(36, 1), Work.PREFILL)
        engine.core.ticketed(large)
        engine.drain()
        assert (engine.preempted, states(engine, large)) == ([young], [State.HELD])
        engine.progress.clear()
        engine.core.release(large)
        engine.core.ticketed(young)
        engine.drain()
        layer, progress = engine.progress[-1]
        assert (layer, progress.key, progress.ready, progress.total) == (1, young, 16, 16)
        assert engine.runner.read(progress.pages, 16) == prompt_of(16)
        assert len(engine.outputs[young]) == 1

    def test_nobody_is_preempted_in_vain(self) -> None:
        engine = FakeEngine(pages=21, unticketed_share=0.5)
        ticketed = engine.add(1, prompt_of(40), Work.PREFILL)
        engine.core.ticketed(ticketed)
        other = engine.add(2, prompt_of(16, 1), Work.PREFILL)
        engine.drain()
        large = engine.add(3, prompt_of(60, 2), Work.PREFILL)
        engine.core.ticketed(large)
        engine.drain()
        assert states(engine, ticketed, other, large) == [State.HELD, State.HELD, State.WAITING]
        assert engine.preempted == []

    def test_shared_pages_count_only_once_they_come_free(self) -> None:
        engine = FakeEngine(pages=15, unticketed_share=1.0)
        ticketed = engine.add(1, prompt_of(17), Work.PREFILL)
        engine.core.ticketed(ticketed)
        engine.drain()
        twin = engine.add(2, prompt_of(18), Work.PREFILL)
        engine.drain()  # 5 pages and 1 of its own
        large = engine.add(3, prompt_of(36, 1), Work.PREFILL)
        engine.core.ticketed(large)
        engine.drain()
        assert states(engine, ticketed, twin, large) == [State.HELD, State.WAITING, State.HELD]
        assert engine.preempted == [twin]

    def test_others_may_take_unticketed_pages_too(self) -> None:
        """Else a request that lacks them would keep ticketed ones out for as long as the tickets wait for those."""
        engine = FakeEngine(pages=11, unticketed_share=1.0)
        unticketed = engine.add(1, prompt_of(36), Work.PREFILL)
        engine.drain()
        local = engine.add(2, prompt_of(12, 1), max_tokens=1)
        ticketed = engine.add(3, prompt_of(8, 2), Work.PREFILL)
        engine.core.ticketed(ticketed)
        engine.drain()
        assert local in engine.ends
        assert states(engine, ticketed) == [State.HELD]
        assert engine.preempted == [unticketed]

    def test_a_growing_pool_of_held_pages_is_waited_for(self) -> None:
        engine = FakeEngine(pages=11)
        held = engine.add(1, prompt_of(24), Work.PREFILL)
        engine.core.ticketed(held)
        engine.drain()
        waiting = engine.add(2, prompt_of(24, 1), Work.PREFILL)
        engine.core.ticketed(waiting)
        assert engine.drain() == 0, "no progress, and no busy loop"
        engine.core.release(held)
        engine.drain()
        assert states(engine, held, waiting) == [None, State.HELD]
