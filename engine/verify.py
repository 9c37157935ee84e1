"""Does the engine compute what transformers computes? Layer by layer, token by token, text by text."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels.tolerances import MODEL_TOLERANCES, ModelTolerance
from .build import TORCH_DTYPES, Engine, build_engine
from .config import DType, EngineOptions
from .model_config import ModelConfig
from .reference import Reference
from .request import Request, SamplingParams, SequenceKey
from .tokenizer import Tokenizer
from .verify_tokenizer import TEXTS, TextCheck, check_tokenizer
from .verify_weights import WeightCheck, check_weights

PROMPTS = (
    "The lighthouse keeper wrote in his journal every night, and on this night he wrote about",
    "今天天气很好，我们一起去公园",
    "🎉🎂 Happy birthday! 🎈 I wish you",
    TEXTS["code"] * 6,
)
MAX_PROMPT = 1024  # tokens of a prompt that are used
PAGE_SIZE = 16
Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """The residual stream at one place, or the logits, over all prompts."""

    name: str  # `embedding`, `layer N` (its output), `logits`
    largest: float  # difference of an element
    relative: float  # largest over the tokens of |difference| / |reference|, Euclidean
    ok: bool


@dataclass(frozen=True, slots=True)
class GreedyCheck:
    """One prompt, continued through the engine's scheduler."""

    prompt_tokens: int
    tokens: int
    agreed: int  # output tokens that are transformers' choice, given all before them
    first_off: int | None  # index of the first that is not
    regret: float  # how far below its best transformers puts the worst of them, in standard deviations of its logits
    ok: bool


@dataclass(frozen=True, slots=True)
class Report:
    """All that was compared."""

    dtype: DType
    layers: list[LayerCheck]
    greedy: list[GreedyCheck]
    texts: list[TextCheck]
    failing: str  # the first place that is off, whose weights follow; empty: none
    weights: list[WeightCheck]

    @property
    def ok(self) -> bool:
        """Whether everything is within its tolerance."""
        return all(check.ok for checks in (self.layers, self.greedy, self.texts) for check in checks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; each check says whether it is ok."""
        whole = asdict(self) | {"ok": self.ok}
        for name in ("texts", "weights"):
            for entry, check in zip(whole[name], getattr(self, name), strict=True):
                entry["ok"] = check.ok
        return whole


def verify(
    model: Path,
    original: Path,
    *,
    dtype: DType = "float32",
    prompts: Sequence[str] = PROMPTS,
    tokens: int = 32,
    progress: Progress = lambda stage, done, total: None,
) -> Report:
    """Compares the engine on `model` with transformers on `original` (both directories; usually the same).

    `tokens`: greedy tokens a prompt. Raises ConfigError where one of them cannot be loaded, or their sizes differ.
    """
    texts = check_tokenizer(model, original)
    progress("tokenizer", len(texts), len(texts))
    ids = _encoded(model, prompts, tokens)
    options = EngineOptions(dtype=dtype, page_size=PAGE_SIZE, kv_memory=_kv_memory(model, dtype, ids, tokens),
                            prefix_cache=False)  # fmt: skip
    engine = build_engine(model, options, fingerprint="verify")
    reference = Reference(original, TORCH_DTYPES[dtype])
    tolerance = MODEL_TOLERANCES[TORCH_DTYPES[dtype]]
    layers = _check_layers(engine, reference, ids, tolerance, progress)
    failing = next((check.name for check in layers if not check.ok), "")
    weights = check_weights(failing, engine.runner.weights, engine.config, reference) if failing else []
    greedy = _check_greedy(reference, ids, _continued(engine, ids, tokens), tolerance, progress)
    return Report(dtype, layers, greedy, texts, failing, weights)


def _encoded(model: Path, prompts: Sequence[str], tokens: int) -> list[list[int]]:
    tokenizer, config = Tokenizer.from_dir(model), ModelConfig.from_dir(model)
    room = min(MAX_PROMPT, config.context_length - tokens)
    ids = [tokenizer.encode(prompt)[: max(room, 0)] for prompt in prompts]
    if not ids or not all(ids):
        raise ConfigError(f"a prompt without tokens, or no room for {tokens} tokens after it", field="prompts")
    return ids


def _kv_memory(model: Path, dtype: DType, ids: Sequence[Sequence[int]], tokens: int) -> int:
    """Bytes for all prompts at once, with a page to spare for each, and the engine's least."""
    config = ModelConfig.from_dir(model)
    pages = sum(-(-(len(prompt) + tokens) // PAGE_SIZE) + 1 for prompt in ids)
    item = TORCH_DTYPES[dtype].itemsize
    return (pages + 64) * PAGE_SIZE * config.layers * 2 * config.kv_heads * config.head_dim * item


class _Errors:
    """Gathers one place's differences."""

    def __init__(self) -> None:
        self.largest = self.relative = 0.0

    def add(self, ours: Tensor, theirs: Tensor) -> None:
        """[tokens, width] each."""
        if ours.shape != theirs.shape:
            raise ConfigError(f"the models differ in size: {list(ours.shape)} and {list(theirs.shape)}", field="model")
        difference = ours.to(torch.float32) - theirs
        relative = difference.norm(dim=1) / theirs.norm(dim=1).clamp_min(1e-20)
        self.largest = max(self.largest, _number(difference.abs().max()))
        self.relative = max(self.relative, _number(relative.max()))


def _number(x: Tensor) -> float:
    """A scalar; NaN is infinite, so that it is never lost in a maximum."""
    return float(x.nan_to_num(nan=float("inf")))


def _check_layers(
    engine: Engine, reference: Reference, ids: list[list[int]], tolerance: ModelTolerance, progress: Progress
) -> list[LayerCheck]:
    names = ["embedding", *(f"layer {i}" for i in range(engine.config.layers)), "logits"]
    errors = [_Errors() for _ in names]
    for i, prompt in enumerate(ids):
        progress("layers", i, len(ids))
        streams, logits = reference.trace(prompt)
        if len(streams) != len(names) - 1:
            raise ConfigError(f"the original has {len(streams) - 1} layers, not {len(names) - 2}", field="model")
        expected = iter(zip(errors, [*streams, logits], strict=True))

        def observe(stream: Tensor, places: Any = expected) -> None:
            error, theirs = next(places)
            error.add(stream, theirs)

        observe(engine.runner.trace(prompt, observe))
    progress("layers", len(ids), len(ids))
    return [
        LayerCheck(name, error.largest, error.relative, error.relative <= tolerance.relative)
        for name, error in zip(names, errors, strict=True)
    ]


def _check_greedy(
    reference: Reference,
    ids: list[list[int]],
    outputs: list[list[int]],
    tolerance: ModelTolerance,
    progress: Progress,
) -> list[GreedyCheck]:
    checks = []
    for i, (prompt, output) in enumerate(zip(ids, outputs, strict=True)):
        progress("greedy tokens", i, len(ids))
        logits = reference.logits([*prompt, *output])[len(prompt) - 1 : -1]  # [tokens, vocab]
        best = logits.max(dim=1)
        off = (best.indices != torch.tensor(output)).nonzero().flatten().tolist()
        chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        regret = _number(((best.values - chosen) / logits.std(dim=1)).max())
        checks.append(
            GreedyCheck(
                len(prompt), len(output), len(output) - len(off), off[0] if off else None, regret,
                regret <= tolerance.regret,
            )
        )  # fmt: skip
    progress("greedy tokens", len(ids), len(ids))
    return checks


def _continued(engine: Engine, ids: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy tokens, all prompts in one batch, prefilled in chunks."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    outputs: dict[int, list[int]] = {i: [] for i in range(len(ids))}
    for i, prompt in enumerate(ids):
        engine.core.add(Request(SequenceKey(1, i, 0, 0), prompt, params))
    while engine.core.has_work():
        result = engine.core.step()
        for _, error in result.failures:
            raise error
        for output in result.outputs:
            outputs[output.key.request] += [token.token_id for token in output.tokens]
    return list(outputs.values())
