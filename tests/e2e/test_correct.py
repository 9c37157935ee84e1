"""The stack answers what the model says: real weights in fp32, through separate processes, against transformers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers

from twostroke.engine.tokenizer import Tokenizer

from .harness import Client, Launch
from .texts import ALL

TOKENS = 64
OTHER_FLAGS = (("--token-budget", "48", "--page-size", "32"), ("--prefill", "0", "--decode", "0", "--both", "1"))
FLAGS = ("--dtype", "float32")
DRAWN = {"temperature": 0.9, "top_p": 0.95, "seed": 1234}


class Part(NamedTuple):
    """How much of the comparison is done; the prompts by index in `ALL`."""

    first: int  # tokens of each of the first requests
    tokens: int  # of each other request
    warm: int
    seeded: int
    alone: tuple[int, ...]
    elsewhere: tuple[int, ...]
    flags: tuple[tuple[str, ...], ...]  # of the stacks elsewhere


@pytest.fixture(scope="module")
def reference(smollm2_dir):
    """transformers' model on the same weights."""
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(smollm2_dir) -> list[list[int]]:
    """Token ids of the texts; the lengths that the issue names are among them."""
    tokenizer = Tokenizer.from_dir(smollm2_dir)
    ids = [tokenizer.encode(text) for text in ALL]
    assert len(ids) >= 24
    assert min(map(len, ids)) == 1
    assert max(map(len, ids)) >= 1000
    return ids


def greedy_departures(reference, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """Output indices at which the greedy choice of transformers, given what came before, is another token."""
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *output]])
        logits = reference(ids, logits_to_keep=len(output) + 1).logits[0]  # [output and one, vocabulary]
    choices = logits[:-1].argmax(-1).tolist()
    return [i for i, (choice, token) in enumerate(zip(choices, output, strict=True)) if choice != token]


async def all_at_once(
    client: Client, prompts: Sequence[Sequence[int]], tokens: int, **options: object
) -> list[list[int]]:
    """Every prompt's output tokens, all requests running together."""
    answers = await asyncio.gather(*(client.tokens(prompt, max_tokens=tokens, **options) for prompt in prompts))
    return [answer.token_ids for answer in answers]


def first(outputs: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """What a shorter request would have got."""
    return [output[:tokens] for output in outputs]


async def compared(launch: Launch, model: Path, prompts: list[list[int]], reference, part: Part) -> None:
    """1P1D against transformers on every prompt; then the same requests in other company, chunks and processes."""
    short = part.tokens
    async with launch("--model", str(model), *FLAGS) as stack:
        client = stack.client
        together = await all_at_once(client, prompts, part.first)
        for prompt, output in zip(prompts, together, strict=True):
            assert len(output) == part.first
            assert greedy_departures(reference, prompt, output) == []
        warm = await all_at_once(client, prompts[-part.warm :], short)
        assert warm == first(together[-part.warm :], short)
        seeded = await all_at_once(client, prompts[: part.seeded], short, **DRAWN)
        assert seeded != first(together[: part.seeded], short)
        for i in part.alone:
            answer = await client.tokens(prompts[i], max_tokens=short)
            assert answer.token_ids == together[i][:short]
            assert answer.finish.prefill_worker != answer.finish.decode_worker
        lone = await client.tokens(prompts[3], max_tokens=short, **DRAWN)
        assert lone.token_ids == seeded[3]
        await stack.whole()
    for flags in part.flags:
        async with launch("--model", str(model), *FLAGS, *flags) as stack:
            chosen = await all_at_once(stack.client, [prompts[i] for i in part.elsewhere], short)
            assert chosen == first([together[i] for i in part.elsewhere], short)
            again = await all_at_once(stack.client, prompts[:4], short, **DRAWN)
            assert again == seeded[:4]
            await stack.whole()


@pytest.mark.timeout(400)
async def test_greedy_and_seeded_outputs(launch: Launch, smollm2_dir, prompts, reference) -> None:
    """All prompts against transformers for 32 tokens; a few of them, cut short, in other company."""
    part = Part(32, tokens=12, warm=2, seeded=5, alone=(0, 20), elsewhere=(0, 9, 20, 22), flags=OTHER_FLAGS[:1])
    await compared(launch, smollm2_dir, prompts, reference, part)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_greedy_and_seeded_outputs_at_full_length(launch: Launch, smollm2_dir, prompts, reference) -> None:
    """The same with every variant at 64 tokens and on more prompts, and in one process too."""
    more = (0, 5, 9, 13, 17, 20, 22, 23)
    part = Part(TOKENS, tokens=TOKENS, warm=6, seeded=16, alone=(0, 9, 23), elsewhere=more, flags=OTHER_FLAGS)
    await compared(launch, smollm2_dir, prompts, reference, part)
