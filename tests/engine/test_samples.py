"""Several samples of one prompt: computed once, parted at its end, then as independent as requests of their own."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from twostroke.engine.build import Engine, build_engine
from twostroke.engine.config import EngineOptions
from twostroke.engine.request import (
    FinishReason,
    Request,
    SamplingParams,
    SequenceKey,
    Token,
    Work,
    sample_keys,
)
from twostroke.engine.sequence import State
from twostroke.errors import InvalidRequest

from .fake_engine import VOCAB, FakeEngine, prompt_of
from .fake_runner import expected_tokens

PAGE = 4
LENGTHS = [1, 3, 4, 5, 8, 11]


def expected(length: int, count: int, sample: int, seed: int = 0) -> list[int]:
    return expected_tokens(prompt_of(length, seed), count, VOCAB, sample=sample)


class TestParting:
    @pytest.mark.parametrize("length", LENGTHS)
    @pytest.mark.parametrize("work", [Work.ALL, Work.DECODE])
    def test_a_prompt_is_computed_once_and_answered_n_times(self, work: Work, length: int) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(length), work, max_tokens=9, samples=4, writer=7)
        engine.drain()
        if work is Work.DECODE:
            assert len(engine.reserved[key].pages) == -(-length // PAGE)  # the copies are no part of it
            engine.arrive(key)
            engine.drain()
        for each in sample_keys(key, 4):
            assert engine.outputs[each] == expected(length, 9, each.sample)
            assert engine.ends[each].finish is FinishReason.LENGTH
        prefilled = 0 if work is Work.DECODE else length
        assert engine.core.load().prefilled_tokens == prefilled
        assert engine.runner.tokens_run == prefilled + 4 * 8
        assert len(engine.runner.copies) == (3 if length % PAGE else 0)
        engine.core.check_integrity(idle=True)

    def test_full_pages_are_shared_and_the_last_one_is_each_sample_s_own(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(10), max_tokens=5, samples=3)
        engine.run_until(lambda: key in engine.outputs)
        tables = [engine.core._roster.live[each].pages for each in sample_keys(key, 3)]
        assert len({tuple(table[:2]) for table in tables}) == 1
        assert len({table[2] for table in tables}) == 3
        assert engine.core.pool.references(tables[0][0]) == 3
        assert engine.core.load().running == 3

    def test_samples_may_begin_anywhere_and_equal_single_ones(self) -> None:
        engine = FakeEngine()
        key = SequenceKey(1, 1, 5, 0)
        request = Request(key, prompt_of(6), SamplingParams(max_tokens=6), arrival=1.0, samples=3)
        engine.core.add(request)
        engine.requests.update({each: replace(request, key=each) for each in sample_keys(key, 3)})
        engine.drain()
        single = replace(request, key=SequenceKey(1, 2, 6, 0), samples=1)
        engine.core.add(single)
        engine.requests[single.key] = single
        engine.drain()
        assert [engine.outputs[each] for each in sample_keys(key, 3)] == [expected(6, 6, s) for s in (5, 6, 7)]
        assert engine.outputs[single.key] == expected(6, 6, 6)

    def test_prefill_tells_every_sample_s_token_and_holds_its_pages_once(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(9), Work.PREFILL, max_tokens=9, samples=3)
        engine.drain()
        assert [engine.outputs[each] for each in sample_keys(key, 3)] == [expected(9, 1, s) for s in range(3)]
        assert engine.core.state_of(key) is State.HELD
        assert engine.core.pool.usable - engine.core.pool.free_pages == 3
        engine.core.release(key)
        assert [engine.core.state_of(each) for each in sample_keys(key, 3)] == [None] * 3
        engine.core.check_integrity(idle=True)

    @pytest.mark.parametrize("ended", [[0], [2], [0, 1], [0, 1, 2]])
    @pytest.mark.parametrize("work", [Work.ALL, Work.DECODE])
    def test_samples_that_end_with_token_0(self, work: Work, ended: list[int]) -> None:
        engine = FakeEngine()
        stop = tuple(expected(7, 1, sample)[0] for sample in ended)
        key = engine.add(1, prompt_of(7), work, max_tokens=5, samples=3, stop_token_ids=stop, writer=7)
        engine.drain()
        if work is Work.DECODE:
            engine.arrive(key)
            engine.drain()
        for each in sample_keys(key, 3):
            assert engine.outputs[each] == engine.expected(each)
            assert (engine.ends[each].finish is FinishReason.STOP) == (each.sample in ended)
        engine.core.check_integrity(idle=True)

    @pytest.mark.parametrize("length", [4, 5])
    def test_one_token_needs_no_copies(self, length: int) -> None:
        engine = FakeEngine(pages=1 + -(-length // PAGE))
        key = engine.add(1, prompt_of(length), max_tokens=1, samples=4)
        engine.drain()
        assert [engine.outputs[each] for each in sample_keys(key, 4)] == [expected(length, 1, s) for s in range(4)]
        assert not engine.runner.copies


class TestCancels:
    @pytest.mark.parametrize("first", [True, False])
    @pytest.mark.parametrize("work", [Work.ALL, Work.DECODE])
    def test_before_the_prompt_is_done(self, work: Work, first: bool) -> None:
        """What was set aside for a sample is free at once; the prompt goes on for the others."""
        engine = FakeEngine(token_budget=4)
        key = engine.add(1, prompt_of(11), work, max_tokens=5, samples=3, writer=7)
        engine.step()
        gone = sample_keys(key, 3)[0 if first else 1]
        free = engine.core.pool.free_pages
        assert engine.core.cancel(gone)
        assert not engine.core.cancel(gone)
        assert engine.core.pool.free_pages == free + (0 if first else 1)
        assert engine.core.carrier(key) == key
        engine.drain()
        if work is Work.DECODE:
            engine.arrive(key)
            engine.drain()
        others = [each for each in sample_keys(key, 3) if each != gone]
        assert [engine.outputs[each] for each in others] == [expected(11, 5, each.sample) for each in others]
        assert gone not in engine.outputs
        engine.core.check_integrity(idle=True)

    @pytest.mark.parametrize("work", list(Work))
    def test_the_last_one_ends_it(self, work: Work) -> None:
        engine = FakeEngine(token_budget=4)
        key = engine.add(1, prompt_of(11), work, max_tokens=5, samples=3, writer=7)
        engine.step()
        for each in sample_keys(key, 3):
            assert engine.core.state_of(key) is not None
            engine.core.cancel(each)
        assert engine.core.state_of(key) is None
        for name in engine.core.pool.holds():
            engine.core.pool.unhold(name)
        engine.core.check_integrity(idle=True)

    def test_afterwards_each_goes_by_itself(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(6), max_tokens=9, samples=3)
        engine.run_until(lambda: key in engine.outputs)
        assert engine.core.cancel(key)
        engine.drain()
        assert [engine.outputs[each] for each in sample_keys(key, 3)[1:]] == [expected(6, 9, s) for s in (1, 2)]
        assert key not in engine.ends
        engine.core.check_integrity(idle=True)

    def test_deadlines_and_failures_name_every_sample_that_is_wanted(self) -> None:
        engine = FakeEngine(token_budget=4)
        key = engine.add(1, prompt_of(11), max_tokens=5, samples=3, deadline=engine.clock() + 1)
        engine.step()
        keys = sample_keys(key, 3)
        engine.core.cancel(keys[0])
        engine.clock.now += 2
        assert [each for each, _ in engine.core.expire(engine.clock.now)] == keys[1:]
        key = engine.add(2, prompt_of(3), max_tokens=5, samples=2)
        engine.runner.fail_with = RuntimeError("planted")
        assert [each for each, _ in engine.step().failures] == sample_keys(key, 2)
        engine.core.check_integrity(idle=True)

    @pytest.mark.parametrize("work", [Work.ALL, Work.DECODE])
    def test_a_copy_that_fails_costs_its_own_samples_only(self, work: Work) -> None:
        engine = FakeEngine()
        other = engine.add(1, prompt_of(5, 1), max_tokens=5)
        key = engine.add(2, prompt_of(6), work, max_tokens=5, samples=2, writer=7)
        engine.runner.fail_copies_with = RuntimeError("planted")
        failed = [each for each, _ in engine.step().failures]
        if work is Work.DECODE:
            engine.write_kv(key)
            with pytest.raises(Exception, match="could not be copied"):
                engine.core.samples_arrived(key, engine.first_tokens(key))
            assert engine.core.state_of(key) is State.AWAITING
            failed = engine.core.abandon(key)
            engine.core.pool.unhold(("ticket", key))
        assert failed == sample_keys(key, 2)
        engine.drain()
        assert engine.outputs[other] == expected(5, 5, 0, seed=1)
        engine.core.check_integrity(idle=True)


class TestRoom:
    def test_copies_are_part_of_the_admission(self) -> None:
        """2 pages of the prompt and 2 copies: with 4 pages it runs, with 3 it never can."""
        engine = FakeEngine(pages=5)
        key = engine.add(1, prompt_of(6), max_tokens=2, samples=3)
        engine.drain()
        assert [engine.outputs[each] for each in sample_keys(key, 3)] == [expected(6, 2, s) for s in range(3)]
        with pytest.raises(InvalidRequest, match="needs 4 KV pages") as refused:
            FakeEngine(pages=4).add(1, prompt_of(6), max_tokens=2, samples=3)
        assert refused.value.field == "samples"

    def test_at_a_border_each_sample_has_a_page_for_its_first_token(self) -> None:
        engine = FakeEngine(pages=6)
        key = engine.add(1, prompt_of(8), max_tokens=3, samples=3)
        engine.drain()
        assert [engine.outputs[each] for each in sample_keys(key, 3)] == [expected(8, 3, s) for s in range(3)]
        with pytest.raises(InvalidRequest):
            FakeEngine(pages=5).add(1, prompt_of(8), max_tokens=3, samples=3)

    def test_a_small_pool_makes_samples_give_way_and_all_end_right(self) -> None:
        engine = FakeEngine(pages=9)
        key = engine.add(1, prompt_of(6), max_tokens=20, samples=4)
        engine.drain()
        assert engine.preempted
        assert [engine.outputs[each] for each in sample_keys(key, 4)] == [expected(6, 20, s) for s in range(4)]
        engine.core.check_integrity(idle=True)

    @pytest.mark.parametrize("reserve", ["expected", "max"])
    def test_a_headroom_that_never_fits_is_given_up(self, reserve: str) -> None:
        engine = FakeEngine(pages=11, reserve=reserve)
        key = engine.add(1, prompt_of(6), max_tokens=30, samples=4)
        engine.drain()
        assert [engine.outputs[each] for each in sample_keys(key, 4)] == [expected(6, 30, s) for s in range(4)]

    def test_a_headroom_that_fits_is_set_aside_for_each(self) -> None:
        engine = FakeEngine(pages=65, reserve="max")
        engine.add(1, prompt_of(6), max_tokens=11, samples=3)
        engine.step()  # positions 0 .. 15: 1 shared page, 3 more each
        assert engine.core.pool.usable - engine.core.pool.free_pages == 1 + 3 * 3

    def test_all_samples_have_a_place_in_the_batch(self) -> None:
        engine = FakeEngine(max_batch=4, token_budget=64)
        first = engine.add(1, prompt_of(40, 1), max_tokens=5, samples=3)
        second = engine.add(2, prompt_of(6), max_tokens=5, samples=2)
        third = engine.add(3, prompt_of(5, 2), max_tokens=5)
        engine.step()
        assert engine.core.load().running == 3
        assert engine.core.state_of(third) is State.WAITING  # behind one that does not fit, else that could starve
        engine.drain()
        for key, samples in ((first, 3), (second, 2), (third, 1)):
            for each in sample_keys(key, samples):
                assert engine.outputs[each] == engine.expected(each)
        with pytest.raises(InvalidRequest, match="more than run here at once") as refused:
            engine.add(4, [1], max_tokens=2, samples=5)
        assert refused.value.field == "samples"
        engine.add(5, [1], Work.PREFILL, max_tokens=2, samples=5)  # they run elsewhere

    @pytest.mark.parametrize("samples", [0, -1, 17])
    def test_out_of_range(self, samples: int) -> None:
        with pytest.raises(InvalidRequest, match="samples"):
            FakeEngine().add(1, [1], samples=samples)

    def test_no_samples_in_a_replay_and_no_name_twice(self) -> None:
        engine = FakeEngine()
        with pytest.raises(InvalidRequest, match="output_ids must be empty"):
            engine.add(1, [1], samples=2, output_ids=[3])
        key = engine.add(1, prompt_of(9), samples=3)
        for sample in (1, 2):
            with pytest.raises(InvalidRequest, match="running already"):
                engine.core.add(Request(key._replace(sample=sample), [1], SamplingParams()))

    def test_token_0_of_every_sample_must_come(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(6), Work.DECODE, samples=2, writer=7)
        engine.step()
        with pytest.raises(InvalidRequest, match="sent no token 0"):
            engine.core.samples_arrived(key, {key: (Token(1), None)})
        with pytest.raises(InvalidRequest, match="token 0 must be"):
            engine.core.samples_arrived(key, {each: (Token(VOCAB), None) for each in sample_keys(key, 2)})
        assert engine.core.state_of(key) is State.AWAITING


class TestModel:
    """With a real model, in fp32."""

    @pytest.fixture
    def engine(self, tiny_llama_dir: Path) -> Engine:
        torch.set_num_threads(1)
        options = EngineOptions(dtype="float32", kv_memory=4 << 20, token_budget=64)
        return build_engine(tiny_llama_dir, options, fingerprint="x")

    def answers(
        self, engine: Engine, length: int, params: SamplingParams, samples: int, first: int = 0
    ) -> list[list[Token]]:
        key = SequenceKey(1, 1, first, 0)
        prompt = [5 + 3 * at % 200 for at in range(length)]
        engine.core.add(Request(key, prompt, params, samples=samples))
        told: dict[SequenceKey, list[Token]] = {}
        while engine.core.has_work():
            result = engine.core.step()
            assert not result.failures
            for output in result.outputs:
                told.setdefault(output.key, []).extend(output.tokens)
        engine.core.check_integrity(idle=True)
        return [told[each] for each in sample_keys(key, samples)]

    @pytest.mark.parametrize("length", [1, 15, 16, 40])
    def test_seeded_samples_differ_and_equal_single_ones(self, engine: Engine, tiny: ModuleType, length: int) -> None:
        params = SamplingParams(temperature=1.0, top_p=0.9, seed=99, max_tokens=12, ignore_eos=True, logprobs=2)
        four = self.answers(engine, length, params, 4)
        assert len({tuple(token.token_id for token in answer) for answer in four}) == 4
        for sample, answer in enumerate(four):
            (single,) = self.answers(engine, length, params, 1, first=sample)
            assert [token.token_id for token in single] == [token.token_id for token in answer]
            for one, other in zip(single, answer, strict=True):
                for (token, value), (same, close) in zip(one.logprobs, other.logprobs, strict=True):
                    assert token == same
                    assert value == pytest.approx(close, abs=1e-4)

    def test_greedy_samples_are_equal(self, engine: Engine) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        three = self.answers(engine, 21, params, 3)
        assert three == [three[0]] * 3

    def test_each_sample_has_its_own_penalties(self, engine: Engine) -> None:
        params = SamplingParams(
            temperature=1.0, seed=4, max_tokens=20, ignore_eos=True, presence_penalty=2.0, repetition_penalty=1.5
        )
        three = self.answers(engine, 21, params, 3)
        assert [self.answers(engine, 21, params, 1, first=sample)[0] for sample in range(3)] == three

    def test_copied_pages_are_whole_in_every_layer(self, engine: Engine) -> None:
        engine.pool.copy_(torch.randn(engine.pool.shape))
        before = engine.pool.clone()
        engine.core._runner.copy_pages([3, 3, 5], [7, 8, 9])
        for source, target in ((3, 7), (3, 8), (5, 9)):
            assert torch.equal(engine.pool[:, target], before[:, source])
        untouched = [page for page in range(engine.pool.shape[1]) if page not in (7, 8, 9)]
        assert torch.equal(engine.pool[:, untouched], before[:, untouched])
