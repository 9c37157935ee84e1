"""Host time of a decode step: the engine's control and the GPU runner's preparations, on any machine.

`python benchmarks/host_step.py` runs `EngineCore` and `CudaRunner` on a CPU with all that a GPU computes left out: no
kernel is launched and nothing is waited for, whatever the host does beside that is real. What a launch itself costs the
host is not in it. `--profile` shows where the time goes.
"""

import argparse
import contextlib
import cProfile
import json
import pstats
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from twostroke.engine.config import EngineOptions
from twostroke.engine.core import EngineCore
from twostroke.engine.cuda import draws
from twostroke.engine.cuda.runner import CudaRunner
from twostroke.engine.dummy_weights import dummy_weights
from twostroke.engine.model_config import ModelConfig
from twostroke.engine.request import Request, SamplingParams, SequenceKey

CONTEXT, VOCAB, PAGE = 8192, 1024, 64
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=CONTEXT, ignore_eos=True),
    "drawn": SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=CONTEXT, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0.8, logprobs=2, max_tokens=CONTEXT, ignore_eos=True),
}
SECTIONS = ("schedule", "launch", "_take_in")  # of a step; the rest is the core's own
LAUNCH = ("_arrange", "_send_decode", "_draw")
ROUNDS = 100  # the fastest one counts: others use the machine too


class Graphs:
    """Stands for captured steps: replaying one does nothing."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def size_for(self, rows: int) -> int:
        """Of rows, rounded up as graphs are."""
        return -(-rows // 8) * 8

    def replay(self, size: int) -> Tensor:
        """[size, vocab]"""
        return self._logits[:size]


class DrawGraphs:
    """Stands for how their tokens are drawn."""

    def replay(self, size: int, random: bool) -> None:
        """Nothing."""


@contextlib.contextmanager
def engine(batch: int) -> Iterator[EngineCore]:
    """With room for `batch` sequences; what a GPU would compute is left out."""
    pages = batch * (CONTEXT // PAGE) + 1
    options = EngineOptions(dtype="float32", page_size=PAGE, max_batch=batch, token_budget=8192 + batch)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        config = ModelConfig.from_dir(Path(folder))
    pool = torch.empty(1, pages, 2, 1, PAGE, 1).expand(1, pages, 2, 1, PAGE, config.head_dim)
    device = CudaRunner(config, dummy_weights(config, torch.float32), options, pool)
    logits = torch.zeros(8192 + 2 * batch, VOCAB)
    made: Any = device
    made.graphs = Graphs(logits)
    made._draws._graphs = DrawGraphs()
    made._decoder.hidden = lambda step, *_, **__: logits
    made._decoder.head = lambda normed: logits[: len(normed)]
    core = EngineCore(
        device,
        options,
        pages=pages,
        context_length=CONTEXT,
        vocab_size=VOCAB,
        eos_token_ids=config.eos_token_ids,
        cache_root=b"x",
    )
    with contextlib.ExitStack() as stack:
        for module, name in ((draws, "keep_tokens"), (draws, "draw"), (draws, "draw_greedy"),
                             (draws, "logprobs")):  # fmt: skip
            stack.enter_context(patch.object(module, name, lambda *_, **__: None))
        yield core


def fill(core: EngineCore, batch: int, length: int, params: SamplingParams) -> None:
    """`batch` sequences that all decode."""
    chance = random.Random(1)
    for number in range(batch):
        count = length + number % PAGE  # so that their pages do not all end with the same step
        prompt = [chance.randrange(3, VOCAB) for _ in range(count)]
        core.add(Request(SequenceKey(1, number, 0, 0), prompt, params))
    tokens = 0
    while tokens < 2 * batch:
        result = core.step()
        for _, error in result.failures:
            raise error
        tokens += sum(len(output.tokens) for output in result.outputs)


class Stopwatch:
    """Seconds by section, of the calls since `reset`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def reset(self) -> None:
        self.seconds = {}

    def around(self, owner: Any, name: str) -> None:
        """Times each call of that method."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

        setattr(owner, name, timed)


def measure(core: EngineCore, steps: int) -> float:
    """Mean seconds of a step."""
    began = time.perf_counter()
    for _ in range(steps):
        if failures := core.step().failures:
            raise failures[0][1]
    return (time.perf_counter() - began) / steps


def sections(core: EngineCore, steps: int) -> dict[str, float]:
    """Seconds of a step by section, of each in its fastest round."""
    watch, made = Stopwatch(), vars(core)
    for owner, name in ((made["_scheduler"], "schedule"), (made["_runner"], "launch"), (core, "_take_in"),
                        *((made["_runner"], name) for name in LAUNCH)):  # fmt: skip
        watch.around(owner, name)
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        watch.reset()
        measure(core, steps)
        for name, seconds in watch.seconds.items():
            best[name] = min(best.get(name, seconds), seconds / steps)
    return best


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--kind", choices=PARAMS, nargs="*", default=list(PARAMS))
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("draws", "step", *SECTIONS, *LAUNCH, title=f"microseconds, {arguments.batch} sequences")
    for kind in arguments.kind:
        with engine(arguments.batch) as core:
            fill(core, arguments.batch, arguments.length, PARAMS[kind])
            plain = min(measure(core, arguments.steps) for _ in range(ROUNDS))
            if arguments.profile:
                with cProfile.Profile() as profile:
                    measure(core, 50 * arguments.steps)
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            best = sections(core, arguments.steps)
            names = (*SECTIONS, *LAUNCH)
            table.add_row(kind, f"{plain * 1e6:.0f}", *(f"{best.get(name, 0.0) * 1e6:.0f}" for name in names))
    Console().print(table)


if __name__ == "__main__":
    main()
