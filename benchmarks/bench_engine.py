"""An engine under measurement: built from a configuration alone, fed with random prompts, driven step by step."""

import argparse
import contextlib
import gc
import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from twostroke.engine.build import Engine, build_engine
from twostroke.engine.config import EngineOptions
from twostroke.engine.model_config import ModelConfig
from twostroke.engine.request import Request, SamplingParams, SequenceKey, StepResult
from twostroke.services.garbage import settle

CONFIG = Path(__file__).parent / "configs" / "llama-3.1-8b.json"
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SPARE = 1.05  # pages beyond those of the sequences: the watermark, the sink


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """What every GPU benchmark takes."""
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--config", type=Path, default=CONFIG, help="a config.json, or a directory with weights")
    parser.add_argument("--dtype", choices=ITEM_BYTES, default="bfloat16")
    parser.add_argument("--page-size", type=int, default=64, help="tokens")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=NUMBER", help="any other engine option")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append records here, not to results/gpu.jsonl")


def model_name(args: argparse.Namespace) -> str:
    """For the records."""
    path: Path = args.config
    return path.stem if path.suffix == ".json" else path.name


@contextlib.contextmanager
def built(
    args: argparse.Namespace, *, sequences: int, pages: int, token_budget: int, **options: Any
) -> Iterator["Bench"]:
    """An engine of `args`, with memory for `pages` pages. The prefix cache is off unless `options` says otherwise."""
    with tempfile.TemporaryDirectory() as scratch:
        path: Path = args.config
        if path.suffix == ".json":
            shutil.copy(path, Path(scratch) / "config.json")
            path = Path(scratch)
            options["load_format"] = "dummy"
        config = ModelConfig.from_dir(path)
        column = config.layers * 2 * config.kv_heads * args.page_size * config.head_dim * ITEM_BYTES[args.dtype]
        chosen: dict[str, Any] = {
            "dtype": args.dtype,
            "device": args.device,
            "page_size": args.page_size,
            "kv_memory": (int(pages * SPARE) + 16) * column,
            "max_batch": sequences,
            "token_budget": token_budget,
            "reserve": "max",
            "prefix_cache": False,
            **options,
            **{name: _number(value) for name, value in (pair.split("=", 1) for pair in args.set)},
        }
        start = time.perf_counter()
        engine = build_engine(path, EngineOptions(**chosen), fingerprint="benchmark")
        built_s = time.perf_counter() - start
        before = gc.get_threshold()
        settle()  # as a worker does
        try:
            yield Bench(engine, built_s)
        finally:
            gc.unfreeze()
            gc.set_threshold(*before)


def _number(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    return {"true": True, "false": False}.get(text, text)


def pages_for(sequences: int, tokens: int, page_size: int) -> int:
    """Pages of that many sequences of that many tokens each."""
    return sequences * -(-tokens // page_size)


@dataclass(slots=True)
class Stream:
    """What came of one request; times are of time.perf_counter."""

    sent: float
    times: list[float] = field(default_factory=list)  # of its tokens
    done: bool = False

    @property
    def gaps(self) -> Iterator[tuple[float, float]]:
        """(when, seconds since the token before), of every token but the first."""
        return ((late, late - early) for early, late in itertools.pairwise(self.times))


class Bench:
    """Drives an engine and keeps the times."""

    def __init__(self, engine: Engine, build_s: float = 0.0, seed: int = 0) -> None:
        """`build_s`: what building it took."""
        self.engine = engine
        self.core = engine.core
        self.build_s = build_s
        self.streams: dict[SequenceKey, Stream] = {}
        self._generator = torch.Generator().manual_seed(seed)
        self._next = 0

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Random tokens, new ones at each call."""
        shape = (count, length)
        ids: list[list[int]] = torch.randint(
            0, self.engine.config.vocab_size, shape, generator=self._generator
        ).tolist()
        return ids

    def add(self, prompt: list[int], tokens: int) -> SequenceKey:
        """A greedy request for exactly so many tokens."""
        key = SequenceKey(1, self._next, 0, 0)
        self._next += 1
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.core.add(Request(key, prompt, params))
        self.streams[key] = Stream(time.perf_counter())
        return key

    def step(self) -> None:
        """One step, its tokens' times noted."""
        self.note(self.core.step())

    def note(self, result: StepResult) -> None:
        """A step's tokens came just now."""
        now = time.perf_counter()
        for _, error in result.failures:
            raise error
        for output in result.outputs:
            stream = self.streams[output.key]
            stream.times += [now] * len(output.tokens)
            stream.done = output.finish is not None

    def finish(self) -> None:
        """Until nothing is left; nothing may be."""
        while self.core.has_work():
            self.step()
        self.core.check_integrity(idle=True)

    def cancel(self, keys: Sequence[SequenceKey]) -> None:
        """Ends requests, and the step that may be on its way."""
        for key in keys:
            self.core.cancel(key)
        self.finish()

    def run(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds from handing them in until each has its tokens."""
        self.streams.clear()
        start = time.perf_counter()
        for prompt in prompts:
            self.add(prompt, tokens)
        while self.core.has_work():
            self.step()
        end = max(stream.times[-1] for stream in self.streams.values())
        if any(len(stream.times) != tokens for stream in self.streams.values()):
            raise RuntimeError("a request did not get its tokens")
        return end - start
