"""Constrained sequences in the engine's control: overlapping steps, neighbours, samples, pages, replays, hand-over."""

import re
import threading
from typing import Any

import pytest
from llguidance import LLMatcher

from twostroke.engine import matching as matching_module
from twostroke.engine.grammar import compile_grammar
from twostroke.engine.request import Constraint, ConstraintKind, FinishReason, SequenceKey, Token, Work
from twostroke.errors import InvalidRequest

from .byte_vocabulary import token_bytes
from .fake_engine import VOCAB, FakeEngine, prompt_of
from .fake_runner import LazyRunner, expected_tokens

BYTES = token_bytes(VOCAB)
EOS = frozenset({0})
WORDS = "(a[0-9]{2}b,){8}z"
CONSTRAINT = Constraint(ConstraintKind.REGEX, WORDS)
LONG = Constraint(ConstraintKind.REGEX, "[a-f]{20,60}")
lazy_or_not = pytest.mark.parametrize("lazy", [False, True])


def text_of(engine: FakeEngine, key: SequenceKey) -> str:
    tokens = [*engine.requests[key].output_ids, *engine.outputs[key]]
    assert tokens[-1] == 0
    return b"".join(BYTES[token] for token in tokens[:-1]).decode()


def run(engine: FakeEngine) -> None:
    while engine.core.has_work():
        engine.step()
    engine.core.check_integrity(idle=True)


@lazy_or_not
def test_outputs_satisfy_their_constraints_and_neighbours_do_not_notice(lazy: bool) -> None:
    engine = FakeEngine(lazy=lazy, eos=EOS, pages=200)
    free = [engine.add(n, prompt_of(9 + n, n), max_tokens=30, ignore_eos=True) for n in range(3)]
    bound = [engine.add(n, prompt_of(5 + n, n), max_tokens=300, constraint=CONSTRAINT) for n in range(3, 6)]
    run(engine)
    for key in free:
        prompt = engine.requests[key].prompt_ids
        assert engine.outputs[key] == expected_tokens(prompt, 30, VOCAB)
    texts = [text_of(engine, key) for key in bound]
    assert all(re.fullmatch(WORDS, text) for text in texts)
    assert len(set(texts)) == 3
    assert all(engine.ends[key].finish is FinishReason.STOP for key in bound)
    if isinstance(engine.runner, LazyRunner):
        assert engine.runner.most_on_the_way == 2, "steps with constrained rows overlap too"
        for key in bound:
            steps = [i for i, step in enumerate(engine.runner.steps) if key in [row[0] for row in step]]
            assert steps == list(range(steps[0], steps[-1] + 1)), "none sits out"


def test_overlapping_steps_give_what_others_give() -> None:
    told = []
    for lazy in (False, True):
        engine = FakeEngine(lazy=lazy, eos=EOS, pages=200)
        keys = [engine.add(n, prompt_of(5 + n, n), max_tokens=90, constraint=LONG, samples=1 + n % 3) for n in range(4)]
        run(engine)
        told.append(dict(engine.outputs))
        assert {key.request for key in told[-1]} == {key.request for key in keys}
    assert told[0] == told[1]


@lazy_or_not
def test_samples_go_their_own_ways(lazy: bool) -> None:
    engine = FakeEngine(lazy=lazy, eos=EOS, pages=200)
    engine.add(1, prompt_of(10, 1), max_tokens=90, constraint=LONG, samples=4)
    run(engine)
    texts = {key.sample: text_of(engine, key) for key in engine.outputs}
    assert set(texts) == {0, 1, 2, 3}
    assert all(re.fullmatch("[a-f]{20,60}", text) for text in texts.values())
    assert len(set(texts.values())) == 4


@lazy_or_not
def test_preempted_sequences_go_on_where_they_were(lazy: bool) -> None:
    alone = []
    for n in range(4):
        engine = FakeEngine(lazy=lazy, eos=EOS, pages=200)
        key = engine.add(n, prompt_of(12, n), max_tokens=90, constraint=LONG)
        run(engine)
        alone.append(engine.outputs[key])
    engine = FakeEngine(lazy=lazy, eos=EOS, pages=40)
    keys = [engine.add(n, prompt_of(12, n), max_tokens=90, constraint=LONG) for n in range(4)]
    run(engine)
    assert engine.preempted
    assert [engine.outputs[key] for key in keys] == alone


@lazy_or_not
@pytest.mark.parametrize("had", [1, 9, 30])
def test_a_replay_goes_on_under_its_constraint(lazy: bool, had: int) -> None:
    """Its state is made from the output that it comes with; many tokens of that in the background."""
    engine = FakeEngine(lazy=lazy, eos=EOS)
    key = engine.add(1, prompt_of(10, 1), max_tokens=200, constraint=CONSTRAINT)
    run(engine)
    whole = engine.outputs[key]
    again = FakeEngine(lazy=lazy, eos=EOS)
    key = again.add(2, prompt_of(10, 1), max_tokens=200, constraint=CONSTRAINT, output_ids=whole[:had])
    run(again)
    assert again.outputs[key] == whole[had:]


def test_a_replay_that_contradicts_its_constraint_fails_alone() -> None:
    engine = FakeEngine(eos=EOS)
    bad = engine.add(1, prompt_of(10, 1), max_tokens=50, constraint=CONSTRAINT, output_ids=[200, 201])
    good = engine.add(2, prompt_of(10, 2), max_tokens=5)
    run(engine)
    assert isinstance(engine.failed[bad], InvalidRequest)
    assert engine.failed[bad].field == "constraint"
    assert len(engine.outputs[good]) == 5


@lazy_or_not
def test_token_0_elsewhere(lazy: bool) -> None:
    """A prefill worker draws token 0 under the constraint; a decode worker goes on from it."""
    prefill = FakeEngine(lazy=lazy, eos=EOS)
    key = prefill.add(1, prompt_of(10, 1), Work.PREFILL, max_tokens=200, constraint=CONSTRAINT, samples=2)
    while len(prefill.outputs) < 2:
        prefill.step()
    firsts = {sample: tokens[0] for sample, tokens in prefill.outputs.items()}
    assert all(BYTES[token].startswith(b"a") for token in firsts.values())
    prefill.core.release(key)
    run(prefill)
    decode = FakeEngine(lazy=lazy, eos=EOS)
    decode.add(1, prompt_of(10, 1), Work.DECODE, max_tokens=200, constraint=CONSTRAINT, samples=2, writer=7)
    while key not in decode.reserved:
        decode.step()
    decode.runner.fill(decode.reserved[key].pages, decode.requests[key].prompt_ids)
    decode.core.pool.unhold(("ticket", key))
    for output in decode.core.samples_arrived(key, {own: (Token(token), None) for own, token in firsts.items()}):
        decode.take(output)
    run(decode)
    assert all(re.fullmatch(WORDS, text_of(decode, own)) for own in firsts)


class Gate:
    """Compiles when it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        monkeypatch.setattr("twostroke.engine.grammars.compile_grammar", self)

    def __call__(self, vocabulary: Any, constraint: Constraint) -> LLMatcher:
        assert self.open.wait(20)
        return compile_grammar(vocabulary, constraint)


@lazy_or_not
@pytest.mark.parametrize("work", [Work.ALL, Work.PREFILL])
def test_a_sequence_waits_for_its_grammar_and_nobody_waits_for_it(
    lazy: bool, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    engine = FakeEngine(lazy=lazy, eos=EOS)
    waiting = engine.add(1, prompt_of(10, 1), work, max_tokens=200, constraint=CONSTRAINT)
    others = [engine.add(n, prompt_of(10, n), max_tokens=20, ignore_eos=True) for n in (2, 3)]
    while len(engine.ends) < 2:
        assert engine.step().progress
    assert engine.ends.keys() == set(others)
    assert waiting not in engine.outputs
    assert engine.core.load().running == 0, "it takes no place and no page"
    assert engine.core.has_work()
    gate.open.set()
    while waiting not in engine.outputs:
        engine.step()
    engine.core.release(waiting) if work is Work.PREFILL else None
    run(engine)


@lazy_or_not
def test_what_is_cancelled_while_it_waits_leaves_nothing(lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    engine = FakeEngine(lazy=lazy, eos=EOS)
    keys = [engine.add(n, prompt_of(10, n), max_tokens=9, constraint=CONSTRAINT) for n in range(3)]
    late = engine.add(3, prompt_of(9, 3), max_tokens=9, constraint=CONSTRAINT, deadline=engine.clock() + 5)
    engine.step()
    assert engine.core.cancel(keys[0])
    engine.clock.now += 10
    assert [key for key, _ in engine.core.expire(engine.clock())] == [late]
    gate.open.set()
    engine.core.cancel(keys[1])
    run(engine)
    assert engine.outputs.keys() == {keys[2]}


@lazy_or_not
def test_slow_constraints_sit_out_and_others_go_on(lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching_module, "SLOW_S", -1.0)  # all are, from their second mask on
    engine = FakeEngine(lazy=lazy, eos=EOS, pages=200)
    slow = [engine.add(n, prompt_of(10, n), max_tokens=200, constraint=CONSTRAINT) for n in range(3)]
    free = engine.add(9, prompt_of(10, 9), max_tokens=100, ignore_eos=True)
    while free not in engine.ends:
        engine.step()
    assert len(engine.runner.steps) <= 104, "each step had a row of the free one"
    run(engine)
    assert all(re.fullmatch(WORDS, text_of(engine, key)) for key in slow)
    assert engine.outputs[free] == expected_tokens(engine.requests[free].prompt_ids, 100, VOCAB)


def test_a_constraint_that_cannot_be_compiled_fails_by_its_field() -> None:
    engine = FakeEngine(eos=EOS)
    bad = engine.add(1, prompt_of(10, 1), max_tokens=9, constraint=Constraint(ConstraintKind.REGEX, "("), samples=2)
    run(engine)
    for key in (bad, bad._replace(sample=1)):
        error = engine.failed[key]
        assert isinstance(error, InvalidRequest)
        assert (error.field, "unclosed" in error.message) == ("constraint", True)


def test_ignore_eos_ends_where_nothing_can_follow() -> None:
    engine = FakeEngine(eos=EOS)
    key = engine.add(1, prompt_of(10, 1), max_tokens=90, constraint=LONG, ignore_eos=True)
    run(engine)
    assert engine.ends[key].finish is FinishReason.STOP
    assert len(text_of(engine, key)) == 60


def test_min_tokens_and_max_tokens() -> None:
    engine = FakeEngine(eos=EOS)
    few = engine.add(1, prompt_of(10, 1), max_tokens=90, constraint=Constraint(ConstraintKind.REGEX, "[a-c]{1,9}"),
                     min_tokens=40)  # fmt: skip
    cut = engine.add(2, prompt_of(10, 2), max_tokens=7, constraint=LONG)
    run(engine)
    assert re.fullmatch("[a-c]{9}", text_of(engine, few))
    assert engine.ends[cut].finish is FinishReason.LENGTH
    assert len(engine.outputs[cut]) == 7
