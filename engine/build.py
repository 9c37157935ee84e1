"""Puts an engine together: configuration, pool, weights, runner, core."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigError
from .config import DType, EngineOptions
from .core import EngineCore
from .huge_pages import use_huge_pages
from .memory import KVPlan, plan_kv
from .model_config import ModelConfig
from .model_files import weight_files
from .prefix_cache import cache_root
from .runner import ModelRunner
from .weights import load_weights

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
    runner: ModelRunner


def build_engine(
    model_dir: Path,
    options: EngineOptions,
    *,
    fingerprint: str,
    allocate: Callable[[int], Tensor] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Load the model and make its pool. Raises ConfigError when model, options and memory do not fit together.

    `fingerprint`: of the model's files; it seeds the prefix cache. `allocate`: given a number of bytes, a flat uint8
    tensor of that size for the pool (a mapped file); else ordinary memory is taken.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    _check_device(options.device)
    config = ModelConfig.from_dir(model_dir)
    plan = plan_kv(config, options)
    dtype = TORCH_DTYPES[options.dtype]
    weights = load_weights(model_dir, config, dtype, options.device)
    if options.device == "cpu" and sum(file.stat().st_size for file in weight_files(model_dir)) >= WORTH_HUGE_PAGES:
        use_huge_pages()  # before the pool is there, most of which is not touched for long
    pool = _pool(plan, dtype, options.device, allocate)
    runner = ModelRunner(config, weights, options, pool)
    core = EngineCore(
        runner,
        options,
        pages=plan.pages,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        cache_root=cache_root(fingerprint, plan.dtype, plan.page_size),
        clock=clock,
    )
    return Engine(core, config, plan, pool, runner)


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise ConfigError(f"device {device} cannot be used: {str(error).splitlines()[0]}", field="device") from error


def _pool(plan: KVPlan, dtype: torch.dtype, device: str, allocate: Callable[[int], Tensor] | None) -> Tensor:
    flat = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device) if allocate is None else allocate(plan.nbytes)
    if flat.numel() != plan.nbytes or flat.dtype != torch.uint8:
        raise ConfigError(f"the pool's memory is {flat.numel()} x {flat.dtype}, not {plan.nbytes} bytes")
    return flat.view(dtype).view(plan.shape)
