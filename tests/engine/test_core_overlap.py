"""EngineCore over a runner whose steps overlap: one is launched before the one before it has been seen."""

import pytest

from twostroke.engine.batch import UNSEEN, Row
from twostroke.engine.request import FinishReason, SamplingParams, SequenceKey, Work

from .fake_engine import VOCAB, FakeEngine, prompt_of
from .fake_runner import LazyRunner, expected_tokens


class Watched(LazyRunner):
    """Notes how many steps are on their way at each launch, this one counted in, and whether it knows its tokens."""

    def __init__(self, pages: int, page_size: int, vocab_size: int, layers: int = 2) -> None:
        super().__init__(pages, page_size, vocab_size, layers)
        self.depths: list[int] = []
        self.unseen: list[int] = []

    def launch(self, rows, hook):  # type: ignore[no-untyped-def]
        self.unseen.append(sum(row.token_ids == [UNSEEN] for row in rows))
        step = super().launch(rows, hook)
        self.depths.append(len(self.on_the_way))
        return step


def lazy(**options: object) -> tuple[FakeEngine, Watched]:
    engine = FakeEngine(lazy=True, **options)  # type: ignore[arg-type]
    runner = Watched(engine.core.pool.pages, engine.options.page_size, VOCAB)
    engine.runner = engine.core._runner = engine.core._postprocessor._runner = runner
    return engine, runner


def test_decoding_is_always_one_step_ahead() -> None:
    engine, runner = lazy()
    keys = [engine.add(number, prompt_of(5 + number, number), max_tokens=9) for number in range(3)]
    engine.drain()
    assert runner.depths == [1] + 8 * [2]  # the end by length is known before the last token is
    assert runner.unseen == [0] + 8 * [3]
    assert [engine.outputs[key] for key in keys] == [engine.expected(key) for key in keys]
    engine.core.check_integrity(idle=True)


def test_a_prompt_in_chunks_is_too() -> None:
    engine, runner = lazy(token_budget=4)
    key = engine.add(1, prompt_of(18), max_tokens=3)
    engine.drain()
    assert runner.depths == [1] + 6 * [2]
    assert engine.outputs[key] == engine.expected(key)


def test_an_end_that_nobody_knew_of_costs_one_row_whose_result_is_void() -> None:
    tokens = expected_tokens(prompt_of(5), 9, VOCAB)
    engine, runner = lazy(eos=frozenset({tokens[3]}))
    key = engine.add(1, prompt_of(5), max_tokens=9)
    engine.run_until(lambda: key in engine.ends)
    assert engine.ends[key].finish is FinishReason.STOP
    assert engine.core.has_work(), "a step that draws its successor is on its way"
    assert engine.core.pool.retiring > 0
    assert engine.core.pool.free_pages < engine.core.pool.usable
    engine.drain()
    assert engine.outputs[key] == tokens[:4]
    assert len(runner.steps) == 5
    engine.core.check_integrity(idle=True)


def test_a_cancelled_sequences_result_is_void_and_its_neighbours_is_not() -> None:
    engine, _ = lazy()
    gone, stays = (engine.add(number, prompt_of(6, number), max_tokens=8) for number in range(2))
    for _ in range(3):
        engine.step()
    assert engine.core.cancel(gone)
    before = len(engine.outputs[gone])
    engine.drain()
    assert len(engine.outputs[gone]) == before
    assert engine.outputs[stays] == engine.expected(stays)
    engine.core.check_integrity(idle=True)


def test_what_depends_on_the_last_token_waits_for_it() -> None:
    """Penalties are computed from all tokens: the next step is not launched before they are seen."""
    engine, runner = lazy()
    params = SamplingParams(max_tokens=6, repetition_penalty=1.5)
    plain = engine.add(1, prompt_of(5), max_tokens=6)
    key = engine.add(2, prompt_of(7, 1), max_tokens=6)
    sequence = engine.core._roster.live[key]
    sequence.request.params, sequence.ruled = params, True
    engine.drain()
    assert max(runner.depths) == 1
    assert runner.unseen == 6 * [0]
    for each in (plain, key):
        assert engine.outputs[each] == engine.expected(each)


def test_samples_part_before_they_go_on() -> None:
    engine, runner = lazy()
    key = engine.add(1, prompt_of(6), max_tokens=4, samples=3)
    engine.drain()
    assert list(map(len, runner.steps)) == [1, 3, 3, 3]
    for sample in engine.samples(key):
        assert engine.outputs[sample] == engine.expected(sample)


def test_a_prefill_only_sequence_draws_one_token() -> None:
    engine, runner = lazy()
    key = engine.add(1, prompt_of(6), Work.PREFILL, max_tokens=4)
    engine.drain()
    assert len(runner.steps) == 1
    assert engine.outputs[key] == engine.expected(key)
    engine.core.release(key)
    engine.core.check_integrity(idle=True)


def test_a_preempted_sequence_draws_its_token_anew() -> None:
    engine, _ = lazy(pages=9, watermark=0.0)
    keys = [engine.add(number, prompt_of(10, number), max_tokens=14) for number in range(2)]
    engine.drain()
    assert engine.preempted
    for key in keys:
        assert engine.outputs[key] == engine.expected(key)
    engine.core.check_integrity(idle=True)


def test_nothing_is_launched_behind_a_step_that_could_not_be() -> None:
    engine, runner = lazy()
    failing = engine.add(1, prompt_of(6), max_tokens=8)
    for _ in range(3):
        engine.step()
    seen = len(engine.outputs[failing])
    engine.runner.fail_with = RuntimeError("no memory")
    result = engine.step()
    assert [key for key, _ in result.failures] == [failing]
    assert len(engine.outputs[failing]) == seen + 1, "what was on its way before is handed out"
    after = engine.add(2, prompt_of(6), max_tokens=3)
    engine.drain()
    assert engine.outputs[after] == engine.expected(after)
    engine.core.check_integrity(idle=True)
    assert not runner.on_the_way


def test_a_step_that_fails_under_way_ends_its_sequences_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = lazy()
    key = engine.add(1, prompt_of(6), max_tokens=8)
    for _ in range(3):
        engine.step()

    def broken(rows: list[Row], hook: object) -> None:
        raise RuntimeError("lost the device")

    monkeypatch.setattr(runner, "run", broken)
    result = engine.step()
    assert [failed for failed, _ in result.failures] == [key]
    result = engine.step()
    assert not result.failures, "the step behind it has nobody left"
    engine.core.check_integrity(idle=True)


def test_load_counts_what_is_launched() -> None:
    engine, _ = lazy(token_budget=4)
    engine.add(1, prompt_of(10), max_tokens=3)
    engine.step()
    assert engine.core.load().waiting_tokens == 6
    assert engine.core.state_of(SequenceKey(1, 1, 0, 0)) is not None


def test_a_sequence_has_one_row_while_it_decodes_and_keeps_its_pages() -> None:
    """Runners keep what they looked up in it."""
    engine, runner = lazy(pages=8, page_size=4, reserve="prompt")
    rows: dict[SequenceKey, list[Row]] = {}
    launch = runner.launch

    def seen(given: list[Row], hook: object) -> object:
        for row in given:
            if row.start >= 6:
                rows.setdefault(row.key, []).append(row)
                assert row.note in (None, row.key)
                row.note = row.key
        return launch(given, hook)

    runner.launch = seen  # type: ignore[assignment]
    keys = [engine.add(number, prompt_of(6, number), max_tokens=12) for number in range(2)]
    engine.drain()
    assert [engine.outputs[key] for key in keys] == [engine.expected(key) for key in keys]
    preempted = {key for key in keys if len({id(row) for row in rows[key]}) > 1}
    assert len(rows[keys[0]]) == 11
    assert keys[0] not in preempted, "the older one keeps its pages"
    assert keys[1] in preempted, "the younger one lost them, and has another row"


def test_a_launch_waits_for_the_step_before_it_only_while_kv_is_awaited() -> None:
    engine, runner = lazy()
    core = engine.core
    assert core.due() == 0
    running = engine.add(1, prompt_of(5), max_tokens=40)
    for _ in range(4):
        engine.step()
    assert core.due() == 0, "nobody could join"
    awaited = engine.add(2, prompt_of(6, 2), Work.DECODE, writer=5, max_tokens=3)
    engine.step()
    assert core._flight is not None
    assert core.due() == core._meter.due(core._flight.began) != 0
    long = engine.add(3, prompt_of(30, 3), max_tokens=2)
    engine.step()
    assert core.due() == 0, "how long a prompt takes is not known"
    engine.arrive(awaited)
    engine.drain()
    assert core.due() == 0
    for key in (running, awaited, long):
        assert engine.outputs[key] == engine.expected(key)
    assert max(runner.depths) == 2


def test_a_step_waits_for_nothing_where_none_is_on_its_way() -> None:
    engine, _ = lazy()
    core = engine.core
    assert not core.launches_only(), "there is no work"
    key = engine.add(1, prompt_of(5), max_tokens=3)
    assert core.launches_only()
    engine.step()
    assert core._flight is not None
    assert not core.launches_only()
    engine.drain()
    assert engine.outputs[key] == engine.expected(key)
    assert not core.launches_only()
