"""EngineCore: the life of a sequence of each kind of work, its ends, failures, times and figures."""

from collections.abc import Callable

import pytest

from twostroke.engine.batch import LayerHook, Row
from twostroke.engine.integrity import IntegrityError
from twostroke.engine.request import FinishReason, Request, SamplingParams, SequenceKey, SequenceTimings, Token, Work
from twostroke.engine.sequence import State
from twostroke.errors import DeadlineExceeded, InvalidRequest, TwostrokeError

from .fake_engine import VOCAB, FakeEngine, prompt_of
from .fake_runner import expected_tokens


class TestEnds:
    def test_max_tokens(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(5), max_tokens=7)
        engine.drain()
        assert engine.ends[key].finish is FinishReason.LENGTH
        assert engine.outputs[key] == expected_tokens(prompt_of(5), 7, VOCAB)

    def test_the_models_end_token_unless_ignored(self) -> None:
        tokens = expected_tokens(prompt_of(5), 6, VOCAB)
        engine = FakeEngine(eos=frozenset({tokens[3]}))
        ends = engine.add(1, prompt_of(5), max_tokens=6)
        goes_on = engine.add(2, prompt_of(5), max_tokens=6, ignore_eos=True)
        engine.drain()
        assert (engine.outputs[ends], engine.ends[ends].finish) == (tokens[:4], FinishReason.STOP)
        assert (engine.outputs[goes_on], engine.ends[goes_on].finish) == (tokens, FinishReason.LENGTH)

    def test_stop_tokens_even_where_the_end_token_is_ignored(self) -> None:
        tokens = expected_tokens(prompt_of(5), 6, VOCAB)
        engine = FakeEngine()
        key = engine.add(1, prompt_of(5), max_tokens=6, ignore_eos=True, stop_token_ids=(VOCAB - 1, tokens[0]))
        engine.drain()
        assert (engine.outputs[key], engine.ends[key].finish) == (tokens[:1], FinishReason.STOP)

    def test_stop_beats_length_on_the_last_token(self) -> None:
        tokens = expected_tokens(prompt_of(5), 3, VOCAB)
        engine = FakeEngine(eos=frozenset({tokens[2]}))
        key = engine.add(1, prompt_of(5), max_tokens=3)
        engine.drain()
        assert engine.ends[key].finish is FinishReason.STOP

    def test_a_full_context(self) -> None:
        engine = FakeEngine(context=12)
        key = engine.add(1, prompt_of(5), max_tokens=100)
        engine.drain()
        assert (len(engine.outputs[key]), engine.ends[key].finish) == (7, FinishReason.LENGTH)

    @pytest.mark.parametrize("work", list(Work))
    def test_a_replay_goes_on_where_it_was(self, work: Work) -> None:
        whole = expected_tokens(prompt_of(9), 8, VOCAB)
        engine = FakeEngine()
        key = engine.add(1, prompt_of(9), work, output_ids=whole[:5], max_tokens=8, writer=7)
        engine.drain()
        if work is Work.DECODE:
            assert len(engine.reserved[key].pages) == 4
            engine.arrive(key)
            engine.drain()
        assert engine.firsts[key].first_index == 5
        assert engine.outputs[key] == (whole[5:6] if work is Work.PREFILL else whole[5:])
        if work is Work.PREFILL:
            assert engine.progress[-1][1].total == 14


class TestPrefill:
    def test_held_until_released(self) -> None:
        engine = FakeEngine(token_budget=6)
        key = engine.add(1, prompt_of(10), Work.PREFILL, max_tokens=5)
        engine.drain()
        assert engine.outputs[key] == expected_tokens(prompt_of(10), 1, VOCAB)
        assert engine.firsts[key].finish is None
        assert engine.core.state_of(key) is State.HELD
        pages = engine.progress[-1][1].pages
        assert len(pages) == 3, "no page for tokens that it will not compute"
        engine.core.release(key)
        engine.core.release(key)
        assert engine.core.state_of(key) is None
        engine.core.check_integrity(idle=True)

    @pytest.mark.parametrize("then", ["publish", "release", "cancel", "abandon", "expire", "next step"])
    def test_its_pages_are_found_once_it_is_told_of(self, then: str) -> None:
        """Not in the step that ends it: a client waits for that one's hand-over."""
        engine = FakeEngine(token_budget=64)
        key = engine.add(1, prompt_of(10), Work.PREFILL, deadline=engine.clock() + 100.0)
        engine.step()
        assert engine.core.state_of(key) is State.HELD
        assert len(engine.core.pool.prefix) == 0
        ways: dict[str, Callable[[], object]] = {
            "publish": engine.core.publish,
            "release": lambda: engine.core.release(key),
            "cancel": lambda: engine.core.cancel(key),
            "abandon": lambda: engine.core.abandon(key),
            "expire": lambda: engine.core.expire(engine.clock() + 200.0),
        }
        if then in ways:
            ways[then]()
            assert len(engine.core.pool.prefix) == 2
        engine.add(2, prompt_of(16), Work.PREFILL)
        engine.step()
        assert engine.progress[-1][1].ready == 16
        assert engine.runner.tokens_run == 10 + 8

    def test_the_hook_hears_of_each_chunk_in_each_layer(self) -> None:
        engine = FakeEngine(token_budget=6)
        engine.add(1, prompt_of(10), Work.PREFILL)
        engine.drain()
        assert [(layer, row.ready, row.total) for layer, row in engine.progress] == [
            (0, 6, 10),
            (1, 6, 10),
            (0, 10, 10),
            (1, 10, 10),
        ]

    def test_the_cached_prefix_counts_as_ready(self) -> None:
        engine = FakeEngine(token_budget=6)
        engine.add(1, prompt_of(9), max_tokens=1)
        engine.drain()
        engine.add(2, prompt_of(16), Work.PREFILL)
        engine.step()
        assert engine.progress[0][1].ready == 8 + 6

    def test_other_works_do_not_call_the_hook(self) -> None:
        engine = FakeEngine()
        engine.add(1, prompt_of(9), max_tokens=3)
        engine.drain()
        assert engine.progress == []

    @pytest.mark.parametrize("max_tokens", [1, 5])
    def test_ended_by_token_0_it_is_held_all_the_same(self, max_tokens: int) -> None:
        token = expected_tokens(prompt_of(9), 1, VOCAB)[0]
        engine = FakeEngine(eos=frozenset({token}) if max_tokens > 1 else frozenset())
        key = engine.add(1, prompt_of(9), Work.PREFILL, max_tokens=max_tokens)
        engine.drain()
        assert engine.ends[key].finish is (FinishReason.STOP if max_tokens > 1 else FinishReason.LENGTH)
        assert engine.core.state_of(key) is State.HELD

    def test_released_early_it_still_answers(self) -> None:
        engine = FakeEngine(token_budget=6)
        key = engine.add(1, prompt_of(10), Work.PREFILL)
        engine.step()
        engine.core.release(key)
        engine.drain()
        assert len(engine.outputs[key]) == 1
        engine.core.check_integrity(idle=True)

    def test_released_while_it_recomputes_it_ends(self) -> None:
        engine = FakeEngine(pages=11, unticketed_share=1.0)
        young = engine.add(1, prompt_of(16), Work.PREFILL)
        engine.drain()
        large = engine.add(2, prompt_of(40, 1), Work.PREFILL)
        engine.core.ticketed(large)
        engine.drain()
        engine.core.release(young)
        engine.core.release(large)
        engine.core.check_integrity(idle=True)

    def test_tickets_and_releases_of_others_are_ignored(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(9), max_tokens=3)
        for other in (key, engine.key(99)):
            engine.core.ticketed(other)
            engine.core.release(other)
        engine.drain()
        assert engine.outputs[key] == engine.expected(key)


class TestDecode:
    def test_reserves_awaits_and_goes_on_from_token_0(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(10), Work.DECODE, writer=77, max_tokens=6)
        result = engine.step()
        (reservation,) = result.reserved
        assert (reservation.key, reservation.writer, reservation.first_position) == (key, 77, 0)
        assert (len(reservation.pages), result.progress, engine.runner.steps) == (3, True, [])
        assert not engine.core.has_work()
        output = engine.arrive(key)
        assert output is not None
        assert (output.first_index, output.finish) == (0, None)
        engine.drain()
        assert engine.outputs[key] == engine.expected(key)
        assert engine.runner.tokens_run == 5, "token 0 was not computed again"
        engine.core.check_integrity(idle=True)

    @pytest.mark.parametrize("pages", [(8, 2), (9, 3)])
    def test_the_page_of_the_first_decoded_token_is_not_the_writers(self, pages: tuple[int, int]) -> None:
        length, count = pages
        engine = FakeEngine()
        key = engine.add(1, prompt_of(length), Work.DECODE, writer=7)
        engine.step()
        assert len(engine.reserved[key].pages) == count
        assert engine.core.pool.usable - engine.core.pool.free_pages == 3

    @pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
    def test_token_0_may_have_been_the_last(self, finish: FinishReason) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(10), Work.DECODE, writer=7, max_tokens=6)
        engine.step()
        output = engine.arrive(key, finish)
        assert output is not None
        assert output.finish is finish
        assert output.timings is not None
        engine.core.check_integrity(idle=True)

    def test_the_limit_holds_whatever_the_writer_says(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(10), Work.DECODE, writer=7, max_tokens=1)
        engine.step()
        assert engine.arrive(key).finish is FinishReason.LENGTH  # type: ignore[union-attr]

    def test_arrivals_of_unknown_or_gone_sequences_are_nothing(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(10), Work.DECODE, writer=7)
        assert engine.core.kv_arrived(key, Token(1), None) is None, "not yet reserved"
        engine.step()
        engine.core.cancel(key)
        assert engine.core.kv_arrived(key, Token(1), None) is None
        other = engine.add(2, prompt_of(3))
        engine.step()
        assert engine.core.kv_arrived(other, Token(1), None) is None

    def test_a_second_arrival_is_nothing(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(10), Work.DECODE, writer=7, max_tokens=3)
        engine.step()
        engine.arrive(key)
        assert engine.core.kv_arrived(key, Token(1), None) is None
        engine.drain()
        engine.check_outputs()

    @pytest.mark.parametrize("token", [-1, VOCAB])
    def test_an_impossible_token_0_changes_nothing(self, token: int) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(10), Work.DECODE, writer=7, max_tokens=3)
        engine.step()
        with pytest.raises(InvalidRequest):
            engine.core.kv_arrived(key, Token(token), None)
        assert engine.core.state_of(key) is State.AWAITING

    def test_cancelled_in_transit_its_pages_are_quarantined_until_the_writer_is_done(self) -> None:
        engine = FakeEngine(pages=6)
        key = engine.add(1, prompt_of(10), Work.DECODE, writer=7, max_tokens=4)
        engine.step()
        assert engine.core.cancel(key)
        assert (engine.core.pool.quarantined, engine.core.pool.free_pages) == (3, 2)
        local = engine.add(2, prompt_of(10, 1), max_tokens=2)
        assert engine.drain() == 0, "those pages are not given out"
        engine.runner.fill(engine.reserved[key].pages, [9] * 12)  # a late write
        engine.core.pool.unhold(("ticket", key))
        engine.drain()
        assert engine.outputs[local] == engine.expected(local)
        engine.core.check_integrity(idle=True)


class TestCancelAndDeadline:
    def test_in_every_state(self) -> None:
        engine = FakeEngine(max_batch=3, token_budget=8)
        waiting_for_ticket = engine.add(1, prompt_of(9, 1), Work.PREFILL, start_now=False)
        held = engine.add(2, prompt_of(5, 2), Work.PREFILL)
        engine.drain()
        running = engine.add(3, prompt_of(5, 3), max_tokens=50)
        awaiting = engine.add(4, prompt_of(9, 4), Work.DECODE, writer=7)
        engine.step()
        engine.step()
        prefilling = engine.add(5, prompt_of(60, 5))
        engine.step()
        waiting = engine.add(6, prompt_of(9, 6))
        engine.step()
        expected = {
            waiting_for_ticket: State.WAITING,
            held: State.HELD,
            running: State.RUNNING,
            awaiting: State.AWAITING,
            prefilling: State.RUNNING,
            waiting: State.WAITING,
        }
        assert {key: engine.core.state_of(key) for key in expected} == expected
        for key in expected:
            assert engine.core.cancel(key)
            assert not engine.core.cancel(key)
            engine.core.check_integrity()
        engine.core.pool.unhold(("ticket", awaiting))
        engine.core.check_integrity(idle=True)
        assert not engine.core.has_work()

    def test_the_key_may_be_used_again(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(9), max_tokens=2)
        with pytest.raises(InvalidRequest) as caught:
            engine.add(1, prompt_of(9))
        assert caught.value.field == "key"
        engine.core.cancel(key)
        engine.add(1, prompt_of(9), max_tokens=2)
        engine.drain()
        assert engine.outputs[key] == engine.expected(key)

    def test_deadlines(self) -> None:
        engine = FakeEngine(token_budget=8)
        now = engine.clock()
        never = engine.add(1, prompt_of(9), max_tokens=3)
        early = engine.add(2, prompt_of(9, 1), deadline=now + 5)
        late = engine.add(3, prompt_of(9, 2), Work.PREFILL, start_now=False, deadline=now + 9)
        engine.step()
        assert engine.core.expire(now + 4.9) == []
        (expired,) = engine.core.expire(now + 5)
        assert expired[0] == early
        assert isinstance(expired[1], DeadlineExceeded)
        assert engine.core.expire(now + 8) == []
        assert [key for key, _ in engine.core.expire(now + 1000)] == [late]
        assert engine.core.expire(now + 2000) == []
        engine.drain()
        assert engine.outputs[never] == engine.expected(never)
        engine.core.check_integrity(idle=True)

    def test_a_refused_request_costs_nothing(self) -> None:
        engine = FakeEngine(pages=5)
        for prompt in ([], [VOCAB], prompt_of(200)):
            with pytest.raises(InvalidRequest):
                engine.add(1, prompt)
        assert not engine.core.has_work()
        engine.core.check_integrity(idle=True)


class TestFailure:
    def test_the_steps_sequences_fail_and_the_others_go_on(self) -> None:
        engine = FakeEngine(max_batch=2)
        failing = [engine.add(number, prompt_of(9, number), max_tokens=4) for number in range(2)]
        waiting = engine.add(2, prompt_of(9, 2), max_tokens=4)
        awaiting = engine.add(3, prompt_of(9, 3), Work.DECODE, writer=7, max_tokens=4)
        engine.step()
        engine.runner.fail_with = RuntimeError("no memory")
        result = engine.step()
        assert [(key, str(error)) for key, error in result.failures] == [(key, "no memory") for key in failing]
        assert result.progress
        assert result.outputs == []
        engine.drain()
        engine.arrive(awaiting)
        engine.drain()
        assert set(engine.ends) == {waiting, awaiting}
        engine.check_outputs()
        engine.core.check_integrity(idle=True)

    def test_half_written_pages_are_not_found_by_others(self) -> None:
        engine = FakeEngine()
        engine.add(1, prompt_of(9), max_tokens=4)
        engine.runner.fail_with = RuntimeError()
        engine.step()
        assert len(engine.core.pool.prefix) == 0
        again = engine.add(2, prompt_of(9), max_tokens=4)
        engine.drain()
        assert engine.firsts[again].timings.cached_tokens == 0  # type: ignore[union-attr]

    def test_a_runner_that_forgets_a_token_is_a_failure(self) -> None:
        engine = FakeEngine()
        engine.add(1, prompt_of(9))

        def nothing(rows: list[Row], hook: LayerHook | None) -> list[Token]:
            return []

        engine.runner.run = nothing  # type: ignore[method-assign]
        ((_, error),) = engine.step().failures
        assert isinstance(error, TwostrokeError)
        assert "0 tokens for 1" in str(error)
        engine.core.check_integrity(idle=True)


class TestFigures:
    def test_times_of_a_local_sequence(self) -> None:
        engine = FakeEngine(token_budget=6)
        key = engine.add(1, prompt_of(10), max_tokens=3)
        engine.clock.now += 2
        engine.step()
        engine.clock.now += 3
        engine.step()
        engine.drain()
        timings = engine.firsts[key].timings
        assert timings is not None
        assert (timings.queue, timings.prefill, timings.transfer, timings.cached_tokens) == (2, 3, 0, 0)
        assert engine.ends[key].timings == timings

    def test_times_of_a_decode_sequence(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(10), Work.DECODE, writer=7, max_tokens=3)
        engine.clock.now += 2
        engine.step()
        engine.clock.now += 4
        engine.arrive(key)
        engine.drain()
        timings = engine.ends[key].timings
        assert timings is not None
        assert (timings.queue, timings.prefill, timings.transfer) == (2, 0, 4)

    def test_what_the_prefill_worker_measured_is_told_as_the_sequence_s_own(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(10), Work.DECODE, writer=7, max_tokens=3)
        engine.step()
        engine.clock.now += 4
        engine.arrive(key, measured=(measured := SequenceTimings(queue=0.5, prefill=0.25, cached_tokens=8)))
        engine.drain()
        wanted = SequenceTimings(queue=0.5, prefill=0.25, transfer=4, cached_tokens=8)
        assert engine.firsts[key].timings == engine.ends[key].timings == wanted
        assert measured.transfer == 0

    def test_without_an_arrival_the_request_arrives_now(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(10), max_tokens=1, arrival=0.0)
        engine.clock.now += 2
        engine.drain()
        assert engine.ends[key].timings.queue == 2  # type: ignore[union-attr]

    def test_load(self) -> None:
        engine = FakeEngine(pages=33, max_batch=3, token_budget=8)
        assert engine.core.load().free_pages == engine.core.load().pages == 32
        engine.add(1, prompt_of(4), max_tokens=50)
        remote = engine.add(2, prompt_of(9, 2), Work.DECODE, writer=7)
        engine.step()
        engine.add(3, prompt_of(20, 3))
        engine.add(4, prompt_of(30, 4), Work.PREFILL, start_now=False)
        engine.step()
        load = engine.core.load()
        assert (load.pages, load.held_pages, load.running, load.waiting) == (32, 3, 3, 1)
        assert load.waiting_tokens == (20 - 7) + 30, "prompts to be computed here"
        assert load.free_pages == 32 - 2 - 3 - 6
        assert load.steps == 2
        engine.core.cancel(remote)
        assert engine.core.load().held_pages == 3

    def test_an_idle_engine_has_no_work_and_makes_no_progress(self) -> None:
        engine = FakeEngine()
        assert not engine.core.has_work()
        result = engine.step()
        assert (result.progress, result.outputs, engine.runner.steps) == (False, [], [])

    def test_keys_differ_by_each_of_their_parts(self) -> None:
        engine = FakeEngine()
        for key in (SequenceKey(1, 1, 0, 0), SequenceKey(2, 1, 0, 0), SequenceKey(1, 1, 1, 0), SequenceKey(1, 1, 0, 1)):
            engine.core.add(Request(key, [1, 2], SamplingParams(max_tokens=1)))
        assert engine.core.load().waiting == 4

    def test_idle_integrity_names_what_is_left(self) -> None:
        engine = FakeEngine()
        key = engine.add(1, prompt_of(9), Work.DECODE, writer=7)
        engine.step()
        with pytest.raises(
            IntegrityError, match=r"1 sequences left; 1 holds left; 3 pages left in use; 2 pages left pending"
        ):
            engine.core.check_integrity(idle=True)
        engine.core.cancel(key)
        with pytest.raises(IntegrityError, match=r"^1 holds left; 3 pages left in use$"):
            engine.core.check_integrity(idle=True)
