"""Random load on the whole engine. On a GPU for TWOSTROKE_GPU_SOAK_S seconds; in short on the CPU.

No NaN, no page lost, no memory more, nothing compiled while serving; a greedy request gets what it gets alone.
"""

import gc
import os
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from twostroke.engine.build import Engine, build_engine
from twostroke.engine.config import EngineOptions
from twostroke.engine.core import EngineCore
from twostroke.engine.grammars import Grammars
from twostroke.engine.runner import ModelRunner
from twostroke.engine.vocabulary import read_vocabulary

from .compile_count import CompileCount
from .cuda_device import DEVICE, ON_GPU, needs_gpu, poisoned
from .random_load import RandomLoad, replay

SOAK_S = float(os.environ.get("TWOSTROKE_GPU_SOAK_S", "20"))
LONG_S = float(os.environ.get("TWOSTROKE_GPU_SOAK_S", "180"))
LONGEST = 16384
WARM = 0.3  # of the time, after which torch's memory must stay as it is
EVERY = 200  # steps between checks of all records


def options(*, pages: int, head_dim: int = 64, layers: int = 2, **chosen: Any) -> EngineOptions:
    """Memory for so many pages of the tiny model, which has two KV heads."""
    chosen = {"page_size": 16, "reserve": "prompt", **chosen}
    item = 4 if chosen["dtype"] == "float32" else 2
    column = layers * 2 * 2 * chosen["page_size"] * head_dim * item
    return EngineOptions(kv_memory=pages * column, **chosen)


def engine(tiny: ModuleType, path: Path, *, context: int, **chosen: Any) -> Engine:
    """A tiny model of a real head size, with a pool that is too small for all that arrives."""
    tiny.make_tiny_llama(path, hidden=256, context=context)
    return poisoned(build_engine(path, options(**chosen), fingerprint="f"))


def checked(load: RandomLoad, index: int) -> None:
    load.tick()
    if index % EVERY == 0:
        load.core.check_integrity()


def ticks(load: RandomLoad, count: int) -> None:
    for _ in range(count):
        load.tick()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_in_short_on_the_cpu(tiny: ModuleType, tmp_path: Path, seed: int) -> None:
    one = engine(tiny, tmp_path, context=512, pages=50, dtype="float32", max_batch=12, token_budget=64)
    load = RandomLoad(one, seed, longest=300, in_flight=16, most_tokens=40)
    for index in range(300):
        checked(load, index)
    load.drain()
    assert min(load.seen[what] for what in ("ended", "cancelled", "preempted", "PREFILL", "constrained")) > 3, load.seen
    replay(one, list(load.single())[:40])
    one.core.check_integrity(idle=True)
    greedy = [asked for asked in load.greedy() if asked.tokens]
    # A token that is not the quiet run's is noticed, and so is a logit that was no number.
    wrong = greedy[0].tokens[-1]
    greedy[0].tokens[-1] = wrong._replace(token_id=(wrong.token_id + 1) % one.config.vocab_size)
    with pytest.raises(AssertionError):
        replay(one, greedy[:1])
    one.runner.weights.norm.fill_(float("nan"))
    load.asked.clear()
    with pytest.raises(AssertionError, match="no numbers"):
        ticks(load, 50)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("seed", [1, 2])
def test_the_gpus_runner_gets_what_the_cpus_gets(tiny: ModuleType, tmp_path: Path, seed: int) -> None:
    """Under Triton's interpreter: steps one ahead, the device's state, its sampler; against the quiet CPU engine."""
    from twostroke.engine.cuda.runner import CudaRunner

    tiny.make_tiny_llama(tmp_path, hidden=64, layers=1, context=256)
    chosen = options(pages=30, head_dim=16, layers=1, dtype="float32", max_batch=6, token_budget=32)
    quiet = poisoned(build_engine(tmp_path, chosen, fingerprint="f"))
    assert isinstance(quiet.runner, ModelRunner)
    config, pool = quiet.config, torch.full_like(quiet.pool, float("nan"))
    runner = CudaRunner(config, quiet.runner.weights, chosen, pool)
    core = EngineCore(
        runner, chosen, pages=quiet.plan.pages, context_length=config.context_length, vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids, cache_root=b"",
        grammars=Grammars(read_vocabulary(tmp_path), config.vocab_size, config.eos_token_ids),
    )  # fmt: skip
    load = RandomLoad(
        replace(quiet, core=core, runner=runner, pool=pool), seed, longest=80, in_flight=8, most_tokens=12
    )
    for _ in range(35):
        load.tick()
        load.core.check_integrity()
    load.drain()
    replay(quiet, list(load.single()))


def soak(tiny: ModuleType, path: Path, seconds: float, dtype: str, seed: int) -> None:
    """The same under a clock, with memory and compilations watched from the moment at which the engine is ready."""
    size = 64
    one = engine(
        tiny, path, context=LONGEST + 1024, pages=3 * LONGEST // size, dtype=dtype, device=DEVICE, page_size=size,
        max_batch=64, token_budget=2048,
    )  # fmt: skip
    load = RandomLoad(one, seed, longest=LONGEST if ON_GPU else 600, in_flight=80)
    begin, flat, index = time.monotonic(), 0, 0
    with CompileCount() as compiled:
        while (spent := time.monotonic() - begin) < seconds:
            checked(load, index)
            index += 1
            if flat == 0 and spent > WARM * seconds:
                flat = reserved()
        load.drain()
    print(dict(load.seen), f"{flat >> 20} MiB reserved, compiled: {compiled.seen}")
    assert not compiled.seen, compiled.seen
    assert reserved() <= flat, f"{reserved() - flat} bytes more"
    assert min(load.seen[what] for what in ("ended", "cancelled", "PREFILL")) > 0, load.seen
    if dtype == "float32":
        replay(one, longest_first(list(load.greedy()))[: 10 + int(seconds)])
    one.core.check_integrity(idle=True)


def longest_first(asked: list[Any]) -> list[Any]:
    """A few long prompts, then as they came."""
    long = sorted(asked, key=lambda each: len(each.request.prompt_ids), reverse=True)[:3]
    return [*long, *(each for each in asked if each not in long)]


def reserved() -> int:
    """Bytes that torch holds of the GPU."""
    gc.collect()
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 1


@pytest.mark.gpu
@needs_gpu
@pytest.mark.timeout(300 + 3 * SOAK_S)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_the_gpu(tiny: ModuleType, tmp_path: Path, dtype: str) -> None:
    soak(tiny, tmp_path, SOAK_S / 2, dtype, seed=3)


@pytest.mark.soak
@needs_gpu
@pytest.mark.timeout(600 + 3 * LONG_S)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_on_the_gpu(tiny: ModuleType, tmp_path: Path, dtype: str) -> None:
    soak(tiny, tmp_path, LONG_S / 2, dtype, seed=int(time.time()))


def test_what_is_compiled_is_counted() -> None:
    knobs = pytest.importorskip("triton.knobs")
    heard: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda **told: heard.append(told["repr"])
    try:
        with CompileCount() as compiled:
            knobs.runtime.jit_post_compile_hook(
                key="k", repr="kernel[num_warps=4](x)", fn=None, compile={}, is_manual_warmup=False,
                already_compiled=False,
            )  # fmt: skip
        assert compiled.seen == heard == ["kernel[num_warps=4](x)"]
        knobs.runtime.jit_post_compile_hook(repr="later")
        assert (len(compiled.seen), len(heard)) == (1, 2)
    finally:
        knobs.runtime.jit_post_compile_hook = None
