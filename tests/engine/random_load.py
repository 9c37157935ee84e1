"""Random requests on a real engine: arrivals, cancels, every length and sampling control; each answer is checked."""

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from twostroke.engine.build import Engine
from twostroke.engine.request import (
    Constraint,
    ConstraintKind,
    Request,
    SamplingParams,
    SequenceKey,
    SequenceOutput,
    Token,
    Work,
    sample_keys,
)

CONSTRAINTS = [  # always with more to follow than the other controls can forbid
    Constraint(ConstraintKind.REGEX, "[A-Za-z ]{1,900}"),
    Constraint(ConstraintKind.GRAMMAR, 'start: (/[a-m]/ | "(" start ")" | /[0-9 ]/)+'),
]
TIE = 1e-3  # nats: float32 computed in another order may take the other of two tokens that are so close


@dataclass(slots=True)
class Asked:
    """A sample under way, or ended."""

    request: Request
    tokens: list[Token] = field(default_factory=list)
    scored: int = 0  # prompt positions told of
    ended: bool = False
    cancelled: bool = False


class RandomLoad:
    """Puts requests on an engine, takes its answers, and remembers what must be the same when nothing else runs."""

    def __init__(self, engine: Engine, seed: int, *, longest: int, in_flight: int, most_tokens: int = 64) -> None:
        """`longest`: tokens of a prompt; `in_flight`: samples at most; `most_tokens`: of an output."""
        self.core = engine.core
        self.seen: Counter[str] = Counter()
        self.asked: dict[SequenceKey, Asked] = {}
        self._live: set[SequenceKey] = set()
        self._draw = random.Random(seed)
        self._draw_constraints = random.Random(seed)
        self._vocab = engine.config.vocab_size
        self._ends = engine.config.eos_token_ids
        self._longest, self._in_flight, self._most_tokens = longest, in_flight, most_tokens
        self._next = 0
        self._prefixes = [self._ids(self._length(longest // 2)) for _ in range(4)]

    def tick(self) -> None:
        """Perhaps something arrives, perhaps something is cancelled; one step."""
        while len(self._live) < self._in_flight and self._draw.random() < 0.4:
            self._arrive()
        if self._live and self._draw.random() < 0.04:
            self._cancel(self._draw.choice(sorted(self._live)))
        self.step()

    def drain(self) -> None:
        """No more arrivals: to the end, and nothing is left over."""
        while self.core.has_work():
            self.step()
        assert not self._live, f"{len(self._live)} never ended"
        self.core.check_integrity(idle=True)

    def step(self) -> None:
        """One step; its answers are checked."""
        result = self.core.step()
        self.seen["steps"] += 1
        self.seen["preempted"] += len(result.preempted)
        for key, error in result.failures:
            raise AssertionError(f"{key} failed") from error
        for output in result.outputs:
            self._take(output)

    def _arrive(self) -> None:
        draw = self._draw
        length = self._length(self._longest)
        prompt = self._ids(length)
        if draw.random() < 0.3:
            prefix = draw.choice(self._prefixes)
            prompt = [*prefix[: draw.randrange(len(prefix) + 1)], *prompt][: self._longest]
        work = Work.PREFILL if draw.random() < 0.08 else Work.ALL
        samples = draw.randint(2, 4) if draw.random() < 0.08 and work is Work.ALL else 1
        key = SequenceKey(1, self._next, 0, 0)
        self._next += 1
        request = Request(key, prompt, self._params(len(prompt)), work, samples=samples)
        self.core.add(request)
        for sample in sample_keys(key, samples):
            self.asked[sample] = Asked(request)
            self._live.add(sample)
        self.seen[work.name] += 1
        self.seen["samples"] += samples

    def _cancel(self, key: SequenceKey) -> None:
        assert self.core.cancel(key)
        self.asked[key].cancelled = True
        self._live.discard(key)
        self.seen["cancelled"] += 1

    def _take(self, output: SequenceOutput) -> None:
        asked = self.asked[output.key]
        assert not asked.ended, f"{output.key} goes on after its end"
        assert not asked.cancelled, f"{output.key} goes on after its cancel"
        params = asked.request.params
        if (scores := output.prompt_logprobs) is not None:
            assert all(-math.inf < value <= 1e-5 for value in scores.values)
            assert all(0 <= token < self._vocab for token in scores.ids)
            asked.scored += len(scores.counts)
        assert output.first_index == len(asked.tokens)
        for token in output.tokens:
            self._check(token, params)
            asked.tokens.append(token)
        self.seen["tokens"] += len(output.tokens)
        if output.finish is not None or (asked.request.work is Work.PREFILL and output.tokens):
            asked.ended = True
            self._live.discard(output.key)
            self.seen["ended"] += 1
            self._check_end(asked)
        if asked.request.work is Work.PREFILL and output.tokens:
            self.core.release(output.key)

    def _check(self, token: Token, params: SamplingParams) -> None:
        assert 0 <= token.token_id < self._vocab
        assert token.token_id not in params.banned_token_ids
        assert not params.allowed_token_ids or token.token_id in params.allowed_token_ids
        if params.logprobs is None:
            assert not token.logprobs
            return
        assert len(token.logprobs) == 1 + params.logprobs
        assert token.logprobs[0][0] == token.token_id
        assert all(-math.inf < value <= 1e-5 for _, value in token.logprobs)
        tops = [value for _, value in token.logprobs[1:]]
        assert tops == sorted(tops, reverse=True)
        # Logits that are no numbers count as impossible; where none is one, all tokens are alike.
        assert not tops or tops[0] > 1e-3 - math.log(self._vocab), "the logits were no numbers"

    def _check_end(self, asked: Asked) -> None:
        params = asked.request.params
        if asked.request.work is Work.ALL:
            last = asked.tokens[-1].token_id
            stopped = last in params.stop_token_ids or (last in self._ends and not params.ignore_eos)
            assert stopped or len(asked.tokens) == params.max_tokens
            assert len(asked.tokens) >= params.min_tokens
        if params.prompt_logprobs is not None and asked.request.key.sample == 0:
            assert asked.scored == len(asked.request.prompt_ids) - 1 or asked.request.samples > 1

    def _ids(self, length: int) -> list[int]:
        return [self._draw.randrange(self._vocab) for _ in range(length)]

    def _length(self, most: int) -> int:
        """Log-uniform from 1 on, the ends and whole pages a little more often."""
        if self._draw.random() < 0.1:
            return self._draw.choice([1, min(64, most), min(128, most), most])
        return min(most, max(1, round(math.exp(self._draw.uniform(0.0, math.log(most + 1))))))

    def _params(self, prompt: int) -> SamplingParams:
        draw = self._draw
        tokens = 1 + int(self._most_tokens ** draw.random())
        params = SamplingParams(temperature=0.0, max_tokens=tokens, seed=draw.getrandbits(64), ignore_eos=True)
        if draw.random() < 0.5:  # plain: compared with a quiet run
            return replace(params, logprobs=2)
        changes: dict[str, Any] = {}
        for name, value in self._controls(tokens, prompt).items():
            if draw.random() < 0.3:
                changes[name] = value
        if "allowed_token_ids" not in changes and self._draw_constraints.random() < 0.3:
            changes["constraint"] = self._draw_constraints.choice(CONSTRAINTS)
            self.seen["constrained"] += 1
        return replace(params, temperature=draw.choice([0.0, 0.5, 1.0, 2.0]), **changes)

    def _controls(self, tokens: int, prompt: int) -> dict[str, Any]:
        draw = self._draw
        some = draw.sample(range(self._vocab), 12)
        controls: dict[str, Any] = {
            "top_k": draw.choice([1, 5, 50]),
            "top_p": draw.choice([0.1, 0.9, 0.99]),
            "min_p": draw.choice([0.01, 0.2]),
            "typical_p": draw.choice([0.3, 0.9]),
            "repetition_penalty": draw.choice([0.8, 1.3]),
            "presence_penalty": draw.choice([-1.0, 0.7]),
            "frequency_penalty": draw.choice([-0.5, 0.5]),
            "logit_bias": tuple((token, draw.uniform(-5, 5)) for token in some[:4]),
            "banned_token_ids": tuple(some[4:7]),
            "bad_words": ((some[7], some[8]), (some[9],)),
            "stop_token_ids": tuple(some[10:]),
            "ignore_eos": False,
            "min_tokens": draw.randint(0, tokens),
            "logprobs": draw.choice([0, 1, 5, 20]),
        }
        if draw.random() < 0.2:
            controls["allowed_token_ids"] = tuple(draw.sample(sorted(set(range(self._vocab)) - set(some)), 40))
        if prompt <= 2000 and draw.random() < 0.3:
            controls["prompt_logprobs"] = draw.choice([0, 2])
        return controls

    def single(self) -> Iterator[Asked]:
        """All that may be run again alone: what depends on the request only."""
        return (each for each in self.asked.values() if each.request.samples == 1 and each.request.work is Work.ALL)

    def greedy(self) -> Iterator[Asked]:
        """Of these, the ones whose tokens depend on the prompt only; cancelled ones with what they got."""
        for asked in self.single():
            params = asked.request.params
            if params == SamplingParams(temperature=0.0, max_tokens=params.max_tokens, seed=params.seed,
                                        ignore_eos=True, logprobs=2):  # fmt: skip
                yield asked


def replay(engine: Engine, chosen: list[Asked]) -> None:
    """Runs each alone: the same tokens, but after a near tie of a greedy one; the same log-probabilities, nearly."""
    for number, asked in enumerate(chosen):
        if not asked.tokens:
            continue
        given = asked.request
        params = replace(given.params, min_tokens=min(given.params.min_tokens, len(asked.tokens)))
        if asked.cancelled:
            params = replace(params, max_tokens=max(len(asked.tokens), params.min_tokens))
        engine.core.add(Request(SequenceKey(2, number, 0, 0), given.prompt_ids, params))
        quiet: list[Token] = []
        while engine.core.has_work():
            for output in engine.core.step().outputs:
                quiet += output.tokens
        assert asked.cancelled or len(quiet) == len(asked.tokens), given.key
        for index, (loud, own) in enumerate(zip(asked.tokens, quiet, strict=False)):
            if loud.token_id != own.token_id:
                assert len(own.logprobs) > 2, (given.key, index, loud, own)
                best, second = own.logprobs[1], own.logprobs[2]
                assert loud.token_id == second[0], (given.key, index)
                assert best[1] - second[1] < TIE, (given.key, index, best, second)
                break
            for (_, mine), (_, theirs) in zip(loud.logprobs, own.logprobs, strict=True):
                assert abs(mine - theirs) < TIE, (given.key, index, loud, own)
