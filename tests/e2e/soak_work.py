"""What a soak asks for: a fixed set of requests of every kind, and what a bare engine answers to them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from twostroke.engine.build import build_engine
from twostroke.engine.config import EngineOptions
from twostroke.engine.models import fingerprint
from twostroke.engine.request import FinishReason, Request, SamplingParams, SequenceKey, Token
from twostroke.v1 import inference_pb2 as pb

from .harness import Answer

TOKENS = range(3, 259)  # the tiny model's bytes: no specials
LOGPROB_ERROR = 1e-3  # other batches round otherwise
BARE = EngineOptions(dtype="float32", kv_memory=64 << 20)


@dataclass(frozen=True)
class Task:
    """A request that may be sent again and again; it has one answer."""

    prompt: list[int]
    params: SamplingParams
    samples: int = 1

    def message(self) -> pb.GenerateRequest:
        """As a client sends it."""
        params = self.params
        return pb.GenerateRequest(
            input=pb.Input(token_ids=pb.TokenIds(ids=self.prompt)),
            sampling=pb.Sampling(
                temperature=params.temperature,
                top_p=params.top_p,
                seed=params.seed,
                repetition_penalty=params.repetition_penalty,
                frequency_penalty=params.frequency_penalty,
            ),
            stopping=pb.Stopping(max_tokens=params.max_tokens, ignore_eos=params.ignore_eos),
            logprobs=params.logprobs,
            n=self.samples,
        )


@dataclass
class Expected:
    """One sample's fault-free output."""

    tokens: list[Token] = field(default_factory=list)
    reason: FinishReason | None = None

    def departure(self, answer: Answer) -> str:
        """How an answer, perhaps one that was cut short, differs from this; empty if it does not."""
        ids = [token.token_id for token in self.tokens]
        got = answer.token_ids
        if got != ids[: len(got)]:
            at = next((i for i, (a, b) in enumerate(zip(got, ids, strict=False)) if a != b), len(ids))
            return f"token {at} of {len(got)} differs"
        if not answer.messages:
            return ""
        told = [entry for message in answer.messages for entry in message.logprobs]
        wanted = [token.logprobs for token in self.tokens[: len(got)] if token.logprobs]
        if len(told) != len(wanted):
            return f"{len(told)} log-probabilities, not {len(wanted)}"
        for at, (entry, (chosen, *top)) in enumerate(zip(told, wanted, strict=True)):
            pairs = [(entry.token_id, entry.logprob), *((other.token_id, other.logprob) for other in entry.top)]
            if [token for token, _ in pairs[:1]] != [chosen[0]] or len(pairs) != 1 + len(top):
                return f"log-probabilities of token {at} are of others"
            if any(abs(a[1] - b[1]) > LOGPROB_ERROR for a, b in zip(pairs, (chosen, *top), strict=True)):
                return f"log-probabilities of token {at}: {pairs}, not {(chosen, *top)}"
        last = answer.messages[-1]
        if last.HasField("finish"):
            if (len(got), last.finish.reason) != (len(ids), self.reason):
                return f"ended after {len(got)} tokens, reason {last.finish.reason}; {len(ids)}, {self.reason} expected"
            if last.finish.usage.output_tokens != len(ids):
                return f"usage says {last.finish.usage.output_tokens} tokens of {len(ids)}"
        return ""


def make_tasks(seed: int, count: int, longest: int) -> list[Task]:
    """Prompts of 1 to 600 tokens, some that begin alike; outputs of 1 to `longest`; greedy, drawn, penalised, several.

    All fractions are exact in binary, so that they pass through 32-bit fields unchanged.
    """
    chance = random.Random(seed)
    prefixes = [chance.choices(TOKENS, k=length) for length in (64, 200, 450)]
    tasks = []
    for number in range(count):
        prefix = chance.choice(prefixes) if chance.random() < 0.5 else []
        drawn, penalised = chance.random() < 0.6, chance.random() < 0.3
        params = SamplingParams(
            temperature=chance.choice((0.75, 1.0)) if drawn else 0.0,
            top_p=chance.choice((0.875, 1.0)) if drawn else 1.0,
            seed=1000 * seed + number,
            max_tokens=chance.choice((1, 2, 3, 17, longest // 8, longest // 4, longest // 2, longest, longest)),
            ignore_eos=chance.random() < 0.8,
            logprobs=chance.choice((0, 3)) if chance.random() < 0.3 else None,
            repetition_penalty=1.25 if penalised else 1.0,
            frequency_penalty=0.125 if penalised else 0.0,
        )
        prompt = prefix + chance.choices(TOKENS, k=chance.choice((1, 5, 15, 16, 17, 33, 100, 150)))
        tasks.append(Task(prompt, params, chance.choice((2, 3, 4)) if chance.random() < 0.2 else 1))
    return tasks


def fault_free(model_dir: Path, tasks: Sequence[Task], options: EngineOptions = BARE) -> list[list[Expected]]:
    """For each task the outputs of its samples, by a bare engine in this process."""
    core = build_engine(model_dir, options, fingerprint=fingerprint(model_dir)).core
    expected = [[Expected() for _ in range(task.samples)] for task in tasks]
    for number, task in enumerate(tasks):
        core.add(Request(SequenceKey(1, number, 0, 0), list(task.prompt), task.params, samples=task.samples))
    while core.has_work():
        result = core.step()
        if result.failures:
            raise RuntimeError(f"the bare engine failed: {result.failures}")
        for output in result.outputs:
            of = expected[output.key.request][output.key.sample]
            of.tokens += output.tokens
            of.reason = output.finish or of.reason
    return expected
