"""Where the tests of the whole engine on a GPU run, and how they ask it. TWOSTROKE_TEST_DEVICE=cpu tests the tests."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.engine.build import Engine, build_engine
from twostroke.engine.config import EngineOptions
from twostroke.engine.request import PromptLogprobs, Request, SamplingParams, SequenceKey, Token

DEVICE = os.environ.get("TWOSTROKE_TEST_DEVICE", "cuda")
ON_GPU = DEVICE.startswith("cuda")
needs_gpu = pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="no CUDA device")


def build(path: Path, **options: Any) -> Engine:
    """An engine on the tests' device; 256 MiB of pages unless said otherwise."""
    chosen = {"device": DEVICE, "kv_memory": 256 << 20, **options}
    return poisoned(build_engine(path, EngineOptions(**chosen), fingerprint="f"))


def poisoned(engine: Engine) -> Engine:
    """With NaN in every page: what was not written must not be seen."""
    engine.pool.fill_(float("nan"))
    settle()  # the engine has a stream of its own
    return engine


def settle() -> None:
    """Waits for all that was launched."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(slots=True)
class Served:
    """What one request got."""

    tokens: list[Token] = field(default_factory=list)
    prompt: list[PromptLogprobs] = field(default_factory=list)
    cached: int = 0  # prompt tokens found in the cache

    @property
    def ids(self) -> list[int]:
        """Of its tokens."""
        return [token.token_id for token in self.tokens]


def serve(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams] | SamplingParams
) -> list[Served]:
    """All at once, to their ends; afterwards nothing is left over."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    served = [Served() for _ in prompts]
    for i, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
        engine.core.add(Request(SequenceKey(1, i, 0, 0), list(prompt), own))
    while engine.core.has_work():
        result = engine.core.step()
        assert not result.failures
        for output in result.outputs:
            mine = served[output.key.request]
            assert output.first_index == len(mine.tokens)
            mine.tokens += output.tokens
            if output.prompt_logprobs is not None:
                mine.prompt.append(output.prompt_logprobs)
            if output.timings is not None:
                mine.cached = output.timings.cached_tokens
    engine.core.check_integrity(idle=True)
    return served
