"""The controls in a whole engine on a tiny model: together as alone, after preemption, replay and from a warm cache."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from twostroke.engine.build import Engine, build_engine
from twostroke.engine.config import EngineOptions
from twostroke.engine.request import Request, SamplingParams, SequenceKey, Work
from twostroke.errors import InvalidRequest

PAGE_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # of the tiny model, all layers
ROOMY = EngineOptions(dtype="float32", kv_memory=400 * PAGE_BYTES)
CONTROLS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(temperature=0.7, typical_p=0.8, min_p=0.02),
    SamplingParams(top_k=40, logit_bias=((30, 4.0), (31, -9.0))),
    SamplingParams(allowed_token_ids=tuple(range(3, 40)), frequency_penalty=2.0),
    SamplingParams(temperature=0.0, banned_token_ids=tuple(range(40, 90)), bad_words=((7, 8), (100,))),
    SamplingParams(temperature=2.0, min_tokens=12, stop_token_ids=tuple(range(3, 60))),
]


@dataclass
class Told:
    """What an engine said of one sequence."""

    tokens: list[int] = field(default_factory=list)
    prompt: list[list[tuple[int, float]]] = field(default_factory=list)
    cached: int = 0
    failure: Exception | None = None


def drive(engine: Engine, requests: list[Request]) -> tuple[list[Told], int]:
    """Runs all to their end: (what was told of each, preemptions)."""
    told = {request.key: Told() for request in requests}
    preempted = 0
    for request in requests:
        engine.core.add(request)
    while engine.core.has_work():
        result = engine.core.step()
        preempted += len(result.preempted)
        for key, error in result.failures:
            told[key].failure = error
        for output in result.outputs:
            it = told[output.key]
            if (stretch := output.prompt_logprobs) is not None:
                assert not output.tokens
                assert not it.tokens, "prompt log-probabilities after token 0"
                assert stretch.first_position == 1 + len(it.prompt), "a gap or a repeat"
                entries = iter(zip(stretch.ids, stretch.values, strict=True))
                it.prompt += [[next(entries) for _ in range(count)] for count in stretch.counts]
                assert next(entries, None) is None
            assert output.first_index == len(it.tokens)
            it.tokens += [token.token_id for token in output.tokens]
            if output.timings is not None:
                it.cached = output.timings.cached_tokens
    engine.core.check_integrity(idle=True)
    return list(told.values()), preempted


def engine_of(path: Path, options: EngineOptions = ROOMY) -> Engine:
    return build_engine(path, options, fingerprint="f")


def requests_of(count: int, wanted: int = 24) -> list[Request]:
    draw = random.Random(5)
    requests = []
    for number in range(count):
        prompt = [draw.randrange(3, 300) for _ in range(draw.choice([1, 5, 16, 33, 70]))]
        params = replace(CONTROLS[number % len(CONTROLS)], seed=draw.getrandbits(64), max_tokens=wanted)
        requests.append(Request(SequenceKey(1, number, 0, 0), prompt, params))
    return requests


@pytest.fixture(scope="module")
def alone(tiny_llama_dir: Path) -> list[list[int]]:
    """Each of 16 requests by itself."""
    engine = engine_of(tiny_llama_dir, replace(ROOMY, prefix_cache=False))
    return [drive(engine, [request])[0][0].tokens for request in requests_of(16)]


@pytest.mark.parametrize("budget", [512, 40])
def test_together_as_alone(tiny_llama_dir: Path, alone: list[list[int]], budget: int) -> None:
    told, _ = drive(engine_of(tiny_llama_dir, replace(ROOMY, token_budget=budget)), requests_of(16))
    assert [it.tokens for it in told] == alone
    assert any(len(tokens) < 24 for tokens in alone)
    assert all(len(tokens) >= 13 for tokens in alone[7::8])


def test_after_preemption(tiny_llama_dir: Path, alone: list[list[int]]) -> None:
    options = replace(ROOMY, kv_memory=20 * PAGE_BYTES, reserve="prompt", watermark=0.0)
    told, preempted = drive(engine_of(tiny_llama_dir, options), requests_of(16))
    assert preempted > 3
    assert [it.tokens for it in told] == alone


@pytest.mark.parametrize("known", [1, 5, 11])
def test_a_replay_goes_on_where_it_was(tiny_llama_dir: Path, alone: list[list[int]], known: int) -> None:
    """`output_ids` count as output: penalties, bad words and min_tokens go on as if nothing had happened."""
    requests = [request for i, request in enumerate(requests_of(16)) if len(alone[i]) > known]
    expected = [tokens[known:] for tokens in alone if len(tokens) > known]
    for request in requests:
        request.output_ids = alone[request.key.request][:known]
    engine = engine_of(tiny_llama_dir)
    rest: list[list[int]] = []
    for request in requests:
        engine.core.add(request)
        rest.append([])
        while engine.core.has_work():
            for output in engine.core.step().outputs:
                rest[-1] += [token.token_id for token in output.tokens]
    assert rest == expected


def test_several_samples_have_their_own_histories(tiny_llama_dir: Path) -> None:
    """Each of n samples is the request that has its number from the start."""
    engine = engine_of(tiny_llama_dir)
    params = replace(CONTROLS[2], seed=9, max_tokens=20, bad_words=((5,), (6, 7)))
    prompt = list(range(10, 40))
    outputs: dict[int, list[int]] = {}
    engine.core.add(Request(SequenceKey(1, 1, 0, 0), prompt, params, samples=3))
    while engine.core.has_work():
        for output in engine.core.step().outputs:
            outputs.setdefault(output.key.sample, []).extend(token.token_id for token in output.tokens)
    for sample in range(3):
        told, _ = drive(engine, [Request(SequenceKey(1, 2, sample, 0), prompt, params)])
        assert told[0].tokens == outputs[sample]


def test_a_sequence_without_a_token_left_fails_by_itself(tiny_llama_dir: Path) -> None:
    """It can draw 9, and then nothing; its neighbour goes on, no page is lost."""
    stuck = SamplingParams(allowed_token_ids=(9,), bad_words=((9, 9),), max_tokens=9)
    requests = [
        Request(SequenceKey(1, 0, 0, 0), [1, 2, 3], stuck),
        Request(SequenceKey(1, 1, 0, 0), [1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True)),
        Request(SequenceKey(1, 2, 0, 0), [1, 9], stuck, work=Work.PREFILL),
    ]
    (first, second, third), _ = drive(engine_of(tiny_llama_dir), requests)
    assert (first.tokens, len(second.tokens), third.tokens) == ([9], 9, [])
    assert isinstance(first.failure, InvalidRequest)
    assert "leave no token at output index 1" in first.failure.message
    assert isinstance(third.failure, InvalidRequest)
    assert "index 0" in third.failure.message


@pytest.fixture(scope="module")
def reference(tiny_llama_dir: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()


def check_prompt(reference: LlamaForCausalLM, prompt: list[int], told: Told, top: int) -> None:
    """Against transformers: own entry first, then the top ones."""
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].double().log_softmax(dim=1)
    assert len(told.prompt) == len(prompt) - 1
    for position, entries in enumerate(told.prompt, 1):
        row = expected[position - 1]
        assert len(entries) == 1 + top
        assert entries[0][0] == prompt[position]
        for token, value in entries:
            assert value == pytest.approx(row[token].item(), abs=1e-3)
        best = row.topk(top).values.tolist() if top else []
        assert [value for _, value in entries[1:]] == pytest.approx(best, abs=1e-3)


def scored(number: int, prompt: list[int], top: int, work: Work = Work.ALL, **params: int) -> Request:
    fields = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, **params}
    return Request(SequenceKey(1, number, 0, 0), prompt, SamplingParams(prompt_logprobs=top, **fields), work=work)


def some_prompts(sizes: list[int]) -> list[list[int]]:
    draw = random.Random(11)
    return [[draw.randrange(3, 300) for _ in range(size)] for size in sizes]


@pytest.mark.parametrize("budget", [512, 23])
def test_prompt_log_probabilities(tiny_llama_dir: Path, reference: LlamaForCausalLM, budget: int) -> None:
    """Of prompts in one chunk and in many, beside requests that want none."""
    prompts = some_prompts([1, 2, 33, 90, 150])
    tops = [3, 0, 2, 20, 1]
    requests = [scored(i, p, top, max_tokens=1 + i) for i, (p, top) in enumerate(zip(prompts, tops, strict=True))]
    requests += [Request(SequenceKey(1, 9, 0, 0), prompts[2], replace(requests[2].params, prompt_logprobs=None))]
    told, _ = drive(engine_of(tiny_llama_dir, replace(ROOMY, token_budget=budget)), requests)
    for prompt, top, it in zip(prompts, tops, told, strict=False):
        check_prompt(reference, prompt, it, top)
    assert told[5].prompt == []
    assert told[5].tokens == told[2].tokens[:3]


def test_they_pass_by_the_cache_and_fill_it(tiny_llama_dir: Path, reference: LlamaForCausalLM) -> None:
    engine = engine_of(tiny_llama_dir)
    (prompt,) = some_prompts([100])
    first, _ = drive(engine, [scored(0, prompt, 2)])
    again, _ = drive(engine, [scored(1, prompt, 2), scored(2, prompt, 2)])
    plain, _ = drive(engine, [Request(SequenceKey(1, 3, 0, 0), prompt, SamplingParams(temperature=0.0, max_tokens=4))])
    for told in (*first, *again):
        assert told.cached == 0
        check_prompt(reference, prompt, told, 2)
    assert plain[0].cached == 96
    assert plain[0].tokens == first[0].tokens


def test_they_are_told_once_whatever_is_preempted(tiny_llama_dir: Path, reference: LlamaForCausalLM) -> None:
    """Growing sequences, older, take the pages of prompts under way and of those that already answered."""
    options = replace(
        ROOMY, kv_memory=17 * PAGE_BYTES, reserve="prompt", watermark=0.0, token_budget=20, prefix_cache=False
    )
    prompts = some_prompts([30, 45, 60, 75, 50])
    requests = [scored(i, p, 1, max_tokens=60) for i, p in enumerate(prompts)]
    told, preempted = drive(engine_of(tiny_llama_dir, options), requests)
    assert preempted > 0
    for prompt, it in zip(prompts, told, strict=True):
        check_prompt(reference, prompt, it, 1)
        assert len(it.tokens) == 60


def test_a_prefill_preempted_half_way_goes_on_telling(tiny_llama_dir: Path, reference: LlamaForCausalLM) -> None:
    """Its pages go to a ticketed one after some positions were told; the recomputation tells the others only."""
    options = replace(ROOMY, kv_memory=17 * PAGE_BYTES, watermark=0.0, token_budget=40, unticketed_share=1.0)
    engine = engine_of(tiny_llama_dir, options)
    victim, other = some_prompts([150, 160])
    engine.core.add(scored(0, victim, 2, Work.PREFILL))
    told, key = Told(), SequenceKey(1, 0, 0, 0)
    lost = False
    for step in range(40):
        result = engine.core.step()
        lost = lost or bool(result.preempted)
        for output in result.outputs:
            if output.key == key and (stretch := output.prompt_logprobs) is not None:
                assert stretch.first_position == 1 + len(told.prompt)
                entries = iter(zip(stretch.ids, stretch.values, strict=True))
                told.prompt += [[next(entries) for _ in range(count)] for count in stretch.counts]
            told.tokens += [token.token_id for token in output.tokens if output.key == key]
        if step == 1:
            assert 0 < len(told.prompt) < 149
            engine.core.add(scored(1, other, 2))
        if told.tokens:
            break
    assert lost
    check_prompt(reference, victim, told, 2)
    engine.core.release(key)


def test_a_decode_worker_computes_none(tiny_llama_dir: Path) -> None:
    """They are the prefill worker's to tell."""
    engine = engine_of(tiny_llama_dir)
    request = scored(0, [1, 2, 3], 2, Work.DECODE)
    request.writer = 7
    engine.core.add(request)
    result = engine.core.step()
    assert len(result.reserved) == 1
    assert result.outputs == []
    assert engine.core.cancel(request.key)
