"""Puts an engine together: configuration, memory plan, weights, pool, runner, core."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from llguidance import LLTokenizer
from torch import Tensor

from ..errors import ConfigError
from .compile_cache import use_compile_cache
from .config import DType, EngineOptions
from .core import EngineCore
from .device import await_memory, check_device, device_memory
from .dummy_weights import dummy_weights
from .grammars import Grammars
from .huge_pages import use_huge_pages
from .memory import KVPlan
from .memory_meter import MemoryMeter
from .memory_plan import MemoryPlan, plan_memory
from .model_config import ModelConfig
from .prefix_cache import cache_root
from .runner import ModelRunner
from .start_times import StartTimes
from .tokenizer import Tokenizer
from .vocabulary import make_vocabulary
from .weights import Weights, load_weights

if TYPE_CHECKING:
    from .cuda.runner import CudaRunner

WORTH_HUGE_PAGES = 32 << 20  # bytes of weights

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class Engine:
    """A worker's inference, ready to step."""

    core: EngineCore
    config: ModelConfig
    plan: KVPlan
    pool: Tensor  # [layers, pages, 2, kv_heads, page_size, head_dim]
    runner: "ModelRunner | CudaRunner"
    memory: MemoryPlan
    times: StartTimes  # until here; who goes on starting adds to them


def build_engine(
    model_dir: Path,
    options: EngineOptions,
    *,
    fingerprint: str,
    allocate: Callable[[int], Tensor] | None = None,
    clock: Callable[[], float] = time.monotonic,
    times: StartTimes | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Engine:
    """Load the model and make its pool. Raises ConfigError when model, options and memory do not fit together.

    `fingerprint`: of the model's files; it seeds the prefix cache. `allocate`: given a number of bytes, a flat uint8
    tensor of that size for the pool (a mapped file); else ordinary memory is taken. `times`: where the time goes is
    added to it. `progress`: told (stage, bytes done, bytes in all) while weights are read.
    """
    times = times or StartTimes()
    with times.part("configuration"):
        if options.threads:
            torch.set_num_threads(options.threads)
        if options.device_type == "cuda":
            use_compile_cache()
        check_device(options.device)
        config = ModelConfig.from_dir(model_dir)
        memory = plan_memory(config, options, device_memory=device_memory(options.device))
        if options.device_type == "cuda":
            await_memory(options.device, memory.total - memory.context)
    dtype, meter = TORCH_DTYPES[options.dtype], MemoryMeter(options.device)
    with times.part("weights"), meter.part("weights"):
        weights = _weights(model_dir, config, options, progress)
        if options.device_type == "cpu" and memory.weights >= WORTH_HUGE_PAGES:
            use_huge_pages()  # before the pool is there, most of which is not touched for long
    with times.part("pool"), meter.part("kv"):
        pool = _pool(memory.kv, dtype, options.device, allocate)
    runner = _runner(config, weights, options, pool, memory, times, meter)
    with times.part("vocabulary"):
        grammars = Grammars(_vocabulary(model_dir, config), config.vocab_size, config.eos_token_ids)
    core = EngineCore(
        runner,
        options,
        pages=memory.kv.pages,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        cache_root=cache_root(fingerprint, memory.kv.dtype, memory.kv.page_size),
        grammars=grammars,
        clock=clock,
    )
    return Engine(core, config, memory.kv, pool, runner, meter.beside(memory), times)


def _vocabulary(model_dir: Path, config: ModelConfig) -> LLTokenizer | str:
    """Or why there is none: everything else works without."""
    try:
        return make_vocabulary(Tokenizer.from_dir(model_dir), config.vocab_size, config.eos_token_ids)
    except ConfigError as error:
        return error.message


def _weights(
    model_dir: Path,
    config: ModelConfig,
    options: EngineOptions,
    progress: Callable[[str, int, int], None] | None,
) -> Weights:
    dtype = TORCH_DTYPES[options.dtype]
    if options.load_format == "dummy":
        return dummy_weights(config, dtype, options.device)
    return load_weights(model_dir, config, dtype, options.device, progress)


def _runner(
    config: ModelConfig,
    weights: Weights,
    options: EngineOptions,
    pool: Tensor,
    memory: MemoryPlan,
    times: StartTimes,
    meter: MemoryMeter,
) -> "ModelRunner | CudaRunner":
    if options.device_type != "cuda":
        with times.part("runner"):
            return ModelRunner(config, weights, options, pool)
    from .cuda.runner import CudaRunner  # Triton is not installed where a CPU serves
    from .cuda.warm_up import warm_up

    with times.part("runner"), meter.part("workspace"):
        runner = CudaRunner(config, weights, options, pool, memory.graph_sizes)
    with times.part("warm-up"):
        warm_up(runner, options, config.context_length, config.vocab_size)
    with times.part("graphs"), meter.part("graphs"):
        runner.capture()
    return runner


def _pool(plan: KVPlan, dtype: torch.dtype, device: str, allocate: Callable[[int], Tensor] | None) -> Tensor:
    flat = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device) if allocate is None else allocate(plan.nbytes)
    if flat.numel() != plan.nbytes or flat.dtype != torch.uint8:
        raise ConfigError(f"the pool's memory is {flat.numel()} x {flat.dtype}, not {plan.nbytes} bytes")
    return flat.view(dtype).view(plan.shape)
