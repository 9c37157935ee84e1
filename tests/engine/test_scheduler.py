"""How a step is made up: budgets, fairness among prompts, growth and preemption."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.engine.request import Request, SamplingParams, SequenceKey, Work
from twostroke.engine.scheduler import share_budget
from twostroke.engine.sequence import Sequence, State

from .fake_engine import FakeEngine, prompt_of


def sequence_of(order: int, remaining: int, priority: int = 0) -> Sequence:
    tokens = [1] * remaining
    request = Request(SequenceKey(1, order, 0, 0), tokens, SamplingParams(), priority=priority)
    return Sequence(request, 0.0, order, remaining + 1, b"", tokens, remaining)


def shares(remaining: dict[int, int], budget: int, enough: int = 1 << 20) -> dict[int, int]:
    prompts = [sequence_of(order, tokens) for order, tokens in remaining.items()]
    return {sequence.key.request: tokens for sequence, tokens in share_budget(prompts, budget, enough)}


class TestShareBudget:
    def test_the_oldest_gets_half_and_the_shortest_go_first(self) -> None:
        assert shares({1: 100, 2: 30, 3: 4, 4: 10}, 40) == {1: 20, 3: 4, 4: 10, 2: 6}

    def test_the_oldest_gets_what_the_others_leave(self) -> None:
        assert shares({1: 100, 2: 5}, 40) == {1: 35, 2: 5}
        assert shares({1: 100}, 40) == {1: 40}

    def test_a_short_oldest_leaves_its_half(self) -> None:
        assert shares({1: 3, 2: 100, 3: 50}, 40) == {1: 3, 3: 37}

    def test_an_odd_budget_rounds_up_for_the_oldest(self) -> None:
        assert shares({1: 9, 2: 9}, 1) == {1: 1}
        assert shares({1: 9, 2: 3}, 3) == {1: 2, 2: 1}

    def test_urgent_prompts_go_before_old_and_short_ones(self) -> None:
        prompts = [sequence_of(1, 100), sequence_of(2, 3), sequence_of(3, 50, -1), sequence_of(4, 5, -1)]
        assert {s.key.request: tokens for s, tokens in share_budget(prompts, 40, 40)} == {3: 35, 4: 5}
        assert {s.key.request: tokens for s, tokens in share_budget(prompts, 60, 60)} == {3: 50, 4: 5, 2: 3, 1: 2}

    def test_nothing_to_share(self) -> None:
        assert share_budget([], 10, 10) == []

    def test_prompts_that_fill_a_step_run_one_after_the_other(self) -> None:
        assert shares({1: 20, 2: 20, 3: 5}, 100, 20) == {1: 20}
        assert shares({1: 19, 2: 20, 3: 5, 4: 4}, 100, 20) == {1: 19, 4: 4}
        assert shares({1: 7, 2: 20, 3: 5, 4: 4}, 100, 20) == {1: 7, 3: 5, 4: 4, 2: 20}

    def test_no_more_join_a_long_prompt_which_gets_the_rest(self) -> None:
        assert shares({1: 1000, 2: 15, 3: 30, 4: 10}, 100, 20) == {1: 75, 2: 15, 4: 10}
        assert shares({1: 1000, 2: 300}, 100, 20) == {1: 50, 2: 50}

    @given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 40), st.integers(1, 70))
    def test_spends_all_it_can_and_never_more(self, lengths: list[int], budget: int, enough: int) -> None:
        result = shares(dict(enumerate(lengths)), budget, enough)
        assert min(budget, sum(lengths), enough) <= sum(result.values()) <= min(budget, sum(lengths))
        assert all(0 < tokens <= lengths[order] for order, tokens in result.items())
        assert result.get(0, 0) >= min(lengths[0], (budget + 1) // 2)


class TestBudget:
    def test_a_short_prompt_does_not_wait_behind_a_long_one(self) -> None:
        engine = FakeEngine(pages=5000, context=20_000, token_budget=512)
        long = engine.add(1, prompt_of(16_000))
        engine.step()
        short = engine.add(2, prompt_of(40, 1))
        engine.step()
        assert len(engine.outputs[short]) == 1, "answered in the very next step"
        assert long not in engine.outputs

    def test_prompts_that_came_together_are_answered_one_after_the_other(self) -> None:
        engine = FakeEngine(pages=500, context=200, token_budget=128, prompt_batch=30)
        keys = [engine.add(number, prompt_of(30, number), max_tokens=1) for number in range(3)]
        for done in range(1, 4):
            engine.step()
            assert [key in engine.outputs for key in keys] == [number < done for number in range(3)]

    def test_they_are_run_together_where_each_step_holds_up_those_that_decode(self) -> None:
        engine = FakeEngine(pages=500, context=200, token_budget=128, prompt_batch=30)
        decoding = engine.add(0, prompt_of(5), max_tokens=50)
        engine.step()
        keys = [engine.add(number, prompt_of(30, number)) for number in range(1, 4)]
        engine.step()
        assert engine.runner.steps[-1] == [(decoding, 5, 1), *((key, 0, 30) for key in keys)]

    def test_the_oldest_prompt_keeps_its_bound_under_a_flood_of_short_ones(self) -> None:
        engine = FakeEngine(pages=2000, context=2000, token_budget=32, max_batch=16)
        long = engine.add(0, prompt_of(1000), max_tokens=1)
        steps = 0
        while long not in engine.ends:
            for number in range(2):
                engine.add(1 + 2 * steps + number, prompt_of(20, 1 + 2 * steps + number), max_tokens=1)
            engine.step()
            steps += 1
            assert steps <= -(-1000 // 16)
        assert engine.outputs[long] == engine.expected(long)

    def test_decode_rows_come_first_and_count(self) -> None:
        engine = FakeEngine(token_budget=8, max_batch=4)
        first = engine.add(1, prompt_of(8), max_tokens=9)
        engine.step()
        second = engine.add(2, prompt_of(20, 1), max_tokens=1)
        engine.step()
        assert engine.runner.steps[-1] == [(first, 8, 1), (second, 0, 7)]

    @pytest.mark.parametrize(("budget", "max_batch"), [(1, 8), (2, 8), (3, 2), (5, 1)])
    def test_tiny_budgets_still_end(self, budget: int, max_batch: int) -> None:
        engine = FakeEngine(token_budget=budget, max_batch=max_batch)
        for number in range(5):
            engine.add(number, prompt_of(3 + number, number), max_tokens=4)
        engine.drain()
        assert len(engine.ends) == 5
        assert max(sum(tokens for _, _, tokens in step) for step in engine.runner.steps) <= budget
        engine.check_outputs()
        engine.core.check_integrity(idle=True)

    @pytest.mark.parametrize("budget", [3, 7, 16, 64, 512])
    def test_the_chunk_size_changes_no_output(self, budget: int) -> None:
        engine = FakeEngine(token_budget=budget, max_batch=3)
        for number, length in enumerate((1, 4, 33, 50)):
            engine.add(number, prompt_of(length, number), max_tokens=7)
        engine.drain()
        assert len(engine.ends) == 4
        engine.check_outputs()

    def test_a_decode_worker_keeps_prompt_chunks_small(self) -> None:
        engine = FakeEngine(token_budget=64, decode_prefill_budget=6, max_batch=4)
        remote = engine.add(1, prompt_of(9), Work.DECODE, writer=5)
        engine.step()
        engine.arrive(remote)
        engine.add(2, prompt_of(20, 1))
        engine.step()
        assert [tokens for _, _, tokens in engine.runner.steps[-1]] == [1, 6]
        engine.core.cancel(remote)
        engine.step()
        assert engine.runner.steps[-1] == [(engine.key(2), 6, 14)], "alone, it computes at full speed"


class TestGrowth:
    def test_the_youngest_gives_way_and_recomputes(self) -> None:
        engine = FakeEngine(pages=7, max_batch=4)
        old = engine.add(1, prompt_of(8), max_tokens=12)
        young = engine.add(2, prompt_of(8, 1), max_tokens=12)
        engine.drain()
        assert set(engine.preempted) == {young}
        assert list(engine.ends) == [old, young]
        engine.check_outputs()
        engine.core.check_integrity(idle=True)

    def test_the_least_urgent_gives_way_however_old_it_is(self) -> None:
        engine = FakeEngine(pages=7, max_batch=8)
        old = engine.add(1, prompt_of(8), max_tokens=12, priority=1)
        young = engine.add(2, prompt_of(8, 1), max_tokens=12)
        engine.drain()
        assert set(engine.preempted) == {old}
        assert list(engine.ends) == [young, old]
        engine.check_outputs()

    def test_an_urgent_one_never_gives_way_to_others(self) -> None:
        engine = FakeEngine(pages=7, max_batch=8)
        engine.add(1, prompt_of(8), max_tokens=12)
        urgent = engine.add(2, prompt_of(8, 1), max_tokens=12, priority=-1)
        engine.add(3, prompt_of(8, 2), max_tokens=12)
        engine.drain()
        assert engine.preempted
        assert urgent not in engine.preempted
        engine.check_outputs()

    def test_age_is_that_of_the_first_arrival(self) -> None:
        engine = FakeEngine(pages=7, max_batch=4)
        late = engine.add(1, prompt_of(8), max_tokens=12, arrival=engine.clock() + 1)
        early = engine.add(2, prompt_of(8, 1), max_tokens=12, arrival=engine.clock() - 1)
        engine.drain()
        assert list(engine.ends) == [early, late]
        assert set(engine.preempted) == {late}

    def test_the_youngest_may_be_the_one_that_grows(self) -> None:
        engine = FakeEngine(pages=6, max_batch=4)
        old = engine.add(1, prompt_of(10), max_tokens=10)
        young = engine.add(2, prompt_of(7, 1), max_tokens=9)
        engine.step()
        engine.step()
        result = engine.step()
        assert result.preempted == [young], "it needed a page first"
        assert engine.core.state_of(old) is State.RUNNING
        engine.drain()
        assert len(engine.ends) == 2
        engine.check_outputs()

    def test_a_preempted_sequence_finds_its_own_pages_again(self) -> None:
        engine = FakeEngine(pages=8, max_batch=4)
        engine.add(1, prompt_of(8), max_tokens=8)
        young = engine.add(2, prompt_of(12, 1), max_tokens=8)
        engine.run_until(lambda: bool(engine.preempted))
        before = len(engine.runner.steps)
        engine.drain()
        again = [row for step in engine.runner.steps[before:] for row in step if row[0] == young]
        assert again[0] == (young, 12, 5), "of 4 full pages, only the one that the older took is computed again"
        engine.check_outputs()

    def test_growth_leaves_tickets_alone(self) -> None:
        engine = FakeEngine(pages=8, max_batch=4)
        local = engine.add(1, prompt_of(7), max_tokens=20)
        awaiting = engine.add(2, prompt_of(16, 1), Work.DECODE, writer=5, max_tokens=2)
        engine.step()
        assert engine.core.state_of(awaiting) is State.AWAITING
        engine.drain()
        assert engine.core.state_of(local) is State.WAITING, "it grew out of what was left and gave way itself"
        assert engine.preempted == [local]
        engine.arrive(awaiting)
        engine.drain()
        assert len(engine.ends) == 2
        engine.check_outputs()
        engine.core.check_integrity(idle=True)

    def test_growth_takes_unticketed_prefill_pages_but_not_ticketed_ones(self) -> None:
        engine = FakeEngine(pages=10, max_batch=4)
        local = engine.add(1, prompt_of(7), max_tokens=29)
        kept = engine.add(2, prompt_of(8, 1), Work.PREFILL)
        given = engine.add(3, prompt_of(8, 2), Work.PREFILL)
        engine.step()
        engine.core.ticketed(kept)
        engine.run_until(lambda: bool(engine.preempted))
        assert engine.preempted == [given]
        engine.drain()
        assert engine.core.state_of(kept) is State.HELD
        engine.core.release(kept)
        engine.drain()
        assert local in engine.ends
        assert engine.core.state_of(given) is State.HELD
        assert engine.outputs[given] == engine.expected(given), "token 0 was not repeated"

    def test_a_preempted_decode_sequence_goes_on_locally(self) -> None:
        engine = FakeEngine(pages=8, max_batch=4)
        old = engine.add(1, prompt_of(8), max_tokens=15)
        remote = engine.add(2, prompt_of(9, 1), Work.DECODE, writer=5, max_tokens=10)
        engine.step()
        engine.arrive(remote)
        engine.drain()
        assert engine.preempted[0] == remote
        assert list(engine.ends) == [old, remote]
        assert len(engine.reserved) == 1, "no second ticket"
        engine.check_outputs()
        engine.core.check_integrity(idle=True)

    def test_sixteen_sequences_in_a_pool_for_two(self) -> None:
        engine = FakeEngine(pages=13, max_batch=16, token_budget=32)
        for number in range(16):
            engine.add(number, prompt_of(5 + number % 7, number), max_tokens=3 + 2 * number % 17)
        engine.drain()
        assert len(engine.ends) == 16
        assert engine.preempted
        engine.check_outputs()
        engine.core.check_integrity(idle=True)
