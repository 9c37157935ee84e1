"""Tiny random models of every architecture through separate prefill and decode processes, against transformers."""

import asyncio
from pathlib import Path

import pytest
import torch

from ..tiny import make_tokenizer
from ..tiny_models import MODELS, VOCAB, add_tokenizer, greedy_departures, make_model
from .harness import Launch

QUICK = ("gemma3", "phi3")
LENGTHS = (1, 9, 40, 150, 211)  # shorter and longer than the windows
TOKENS = 32
FLAGS = ("--dtype", "float32", "--kv-memory", "16MiB", "--token-budget", "48")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
async def test_1p1d_equals_transformers(launch: Launch, tmp_path: Path, name: str) -> None:
    directory = tmp_path / "model"
    model = make_model(directory, name)
    add_tokenizer(directory, make_tokenizer())
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    async with launch("--model", str(directory), *FLAGS) as stack:
        answers = await asyncio.gather(*(stack.client.tokens(prompt, max_tokens=TOKENS) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer.token_ids) == TOKENS
            assert greedy_departures(model, prompt, answer.token_ids) == []
            assert answer.finish.prefill_worker != answer.finish.decode_worker
        await stack.whole()
