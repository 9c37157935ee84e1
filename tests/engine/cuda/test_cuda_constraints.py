"""Constrained rows on a GPU, or under Triton's interpreter, against the plain runner: the same tokens, all allowed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.engine.config import EngineOptions
from twostroke.engine.core import EngineCore
from twostroke.engine.cuda.runner import CudaRunner
from twostroke.engine.grammars import Grammars
from twostroke.engine.model_config import ModelConfig
from twostroke.engine.request import (
    Constraint,
    ConstraintKind,
    FinishReason,
    Request,
    SamplingParams,
    SequenceKey,
    Token,
)
from twostroke.engine.runner import ModelRunner
from twostroke.engine.tokenizer import Tokenizer
from twostroke.engine.vocabulary import read_vocabulary
from twostroke.engine.weights import load_weights

PAGES = 60
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
K = ConstraintKind
SCHEMA = {"type": "array", "items": {"enum": ["the", "on", "日"]}, "minItems": 1, "maxItems": 3}


def build(path: Path, runner: type[Any]) -> EngineCore:
    config = ModelConfig.from_dir(path)
    chosen = EngineOptions(dtype="float32", page_size=16, max_batch=8, token_budget=48)
    device = DEVICE if runner is CudaRunner else "cpu"
    shape = (config.layers, PAGES, 2, config.kv_heads, chosen.page_size, config.head_dim)
    pool = torch.full(shape, float("nan"), device=device)
    return EngineCore(
        runner(config, load_weights(path, config, torch.float32, device), chosen, pool),
        chosen,
        pages=PAGES,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        cache_root=b"x",
        grammars=Grammars(read_vocabulary(path), config.vocab_size, config.eos_token_ids),
    )


def requests(tokens: int) -> list[Request]:
    """Constrained rows of every way to draw, several samples, one scored; and free ones beside them."""
    digits = Constraint(K.REGEX, r"[0-9]{2,30}")
    each = [
        (SamplingParams(temperature=0.0, logprobs=3, constraint=digits), 1),
        (SamplingParams(temperature=1.5, seed=5, constraint=Constraint(K.JSON_SCHEMA, json.dumps(SCHEMA))), 1),
        (SamplingParams(temperature=0.9, seed=7, top_k=9, top_p=0.8, logprobs=0, constraint=digits), 2),
        (SamplingParams(temperature=0.0, repetition_penalty=1.4, prompt_logprobs=1, constraint=digits), 1),
        (SamplingParams(temperature=0.8, seed=1), 1),
        (SamplingParams(temperature=0.0), 1),
    ]
    return [
        Request(
            SequenceKey(1, i, 0, 0), [3 + i, 4, 9], SamplingParams(**{**_fields(p), "max_tokens": tokens}), samples=n
        )
        for i, (p, n) in enumerate(each)
    ]


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def serve(core: EngineCore, wanted: list[Request]) -> tuple[dict[SequenceKey, list[Token]], set[SequenceKey]]:
    told: dict[SequenceKey, list[Token]] = {}
    stopped: set[SequenceKey] = set()
    for request in wanted:
        core.add(request)
    while core.has_work():
        result = core.step()
        assert not result.failures
        for output in result.outputs:
            told.setdefault(output.key, []).extend(output.tokens)
            if output.finish is FinishReason.STOP:
                stopped.add(output.key)
    core.check_integrity(idle=True)
    return told, stopped


@pytest.mark.parametrize("tokens", [2, pytest.param(24, marks=pytest.mark.slow)])
def test_the_same_tokens_as_the_plain_runner(tiny_llama_dir: Path, tokens: int) -> None:
    expected, ended = serve(build(tiny_llama_dir, ModelRunner), requests(tokens))
    got, also_ended = serve(build(tiny_llama_dir, CudaRunner), requests(tokens))
    assert got.keys() == expected.keys()
    assert also_ended == ended
    tokenizer = Tokenizer.from_dir(tiny_llama_dir)
    for key, plain in expected.items():
        assert [token.token_id for token in got[key]] == [token.token_id for token in plain], key
        for mine, theirs in zip(got[key], plain, strict=True):
            assert [i for i, _ in mine.logprobs] == [i for i, _ in theirs.logprobs]
            assert [v for _, v in mine.logprobs] == pytest.approx([v for _, v in theirs.logprobs], abs=1e-4)
        if key.request in (0, 2, 3):
            assert tokenizer.decode([token.token_id for token in plain]).isdigit()
