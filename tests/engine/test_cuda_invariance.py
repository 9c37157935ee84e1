"""`--batch-invariant` on a GPU, real weights: the same bits alone, among 255 others, in any chunks, after hits."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twostroke.engine.build import Engine
from twostroke.engine.request import SamplingParams

from .cuda_device import ON_GPU, Served, build, needs_gpu, serve

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), needs_gpu]
VOCAB = 49152
LENGTHS = (1, 2, 63, 64, 65, 300, 1000) if ON_GPU else (1, 2, 63, 64, 65)
TOKENS = 48 if ON_GPU else 4
OTHERS = 255 if ON_GPU else 12
BUDGETS = (8192, 640, 320) if ON_GPU else (512, 48)


def prompts(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(length)] for length in lengths]


def wanted() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that are looked at, greedy and sampled, with the log-probabilities that show the last bit."""
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=3)
    kinds = [greedy, replace(greedy, temperature=0.8, seed=5), replace(greedy, temperature=1.2, top_k=40, top_p=0.9)]
    given = prompts(LENGTHS, 1)
    return given, [replace(kinds[i % 3], seed=i) for i in range(len(given))]


def engine(path: Path, budget: int, **options: Any) -> Engine:
    chosen = {"dtype": "bfloat16", "max_batch": OTHERS + 1, "kv_memory": 4 << 30, "prefix_cache": False, **options}
    if not ON_GPU:
        chosen |= {"dtype": "float32", "kv_memory": 256 << 20}
    return build(path, token_budget=budget, batch_invariant=ON_GPU, **chosen)


def same(served: Served, expected: Served) -> None:
    assert served.ids == expected.ids
    if ON_GPU:
        assert served.tokens == expected.tokens  # the log-probabilities, to the bit


@pytest.fixture(scope="module")
def alone(smollm2_dir: Path) -> list[Served]:
    one = engine(smollm2_dir, BUDGETS[0])
    given, params = wanted()
    return [serve(one, [prompt], own)[0] for prompt, own in zip(given, params, strict=True)]


@pytest.mark.parametrize("budget", BUDGETS)
def test_among_others_in_any_chunks(smollm2_dir: Path, alone: list[Served], budget: int) -> None:
    given, params = wanted()
    draw = random.Random(budget)
    others = OTHERS + 1 - len(given)
    crowd = prompts(tuple(draw.choice([1, 5, 30, 100, 200]) for _ in range(others)), 2)
    crowd_params = [
        SamplingParams(temperature=draw.choice([0.0, 1.0]), seed=i, max_tokens=draw.randrange(1, TOKENS + 9),
                       ignore_eos=True, top_k=draw.choice([0, 30]))
        for i in range(others)
    ]  # fmt: skip
    mixed = [*zip(given, params, alone, strict=True), *((p, s, None) for p, s in zip(crowd, crowd_params, strict=True))]
    draw.shuffle(mixed)
    served = serve(engine(smollm2_dir, budget), [p for p, _, _ in mixed], [s for _, s, _ in mixed])
    for mine, (_, _, expected) in zip(served, mixed, strict=True):
        if expected is not None:
            same(mine, expected)


def test_after_prefix_hits(smollm2_dir: Path, alone: list[Served]) -> None:
    cached = engine(smollm2_dir, BUDGETS[0], prefix_cache=True)
    given, params = wanted()
    size = cached.plan.page_size
    for prompt in given:  # fills the cache with beginnings of different lengths
        serve(cached, [[*prompt[: len(prompt) * 2 // 3], 7]], SamplingParams(temperature=0.0, max_tokens=1))
    for _ in range(2):
        served = serve(cached, given, params)
        for mine, expected in zip(served, alone, strict=True):
            same(mine, expected)
    assert [mine.cached for mine in served] == [(len(prompt) - 1) // size * size for prompt in given]
