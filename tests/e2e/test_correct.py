"""The stack answers what the model says: real weights in fp32, through separate processes, against transformers."""

import asyncio
from collections.abc import Sequence

import pytest
import torch
import transformers

from twostroke.engine.tokenizer import Tokenizer

from .harness import Client, Launch
from .texts import ALL

TOKENS = 64
FLAGS = ("--dtype", "float32")


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
        logits = reference(torch.tensor([[*prompt, *output]])).logits[0]  # [tokens, vocabulary]
    choices = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return [i for i, (choice, token) in enumerate(zip(choices, output, strict=True)) if choice != token]


async def all_at_once(client: Client, prompts: Sequence[Sequence[int]], **options: object) -> list[list[int]]:
    """Every prompt's output tokens, all requests running together."""
    answers = await asyncio.gather(*(client.tokens(prompt, max_tokens=TOKENS, **options) for prompt in prompts))
    return [answer.token_ids for answer in answers]


async def test_greedy_and_seeded_outputs(launch: Launch, smollm2_dir, prompts, reference) -> None:
    """1P1D equals transformers on 24 prompts; alone, warm, small chunks and `both` equal 1P1D, with a seed too."""
    async with launch("--model", str(smollm2_dir), *FLAGS) as stack:
        together = await all_at_once(stack.client, prompts)
        for prompt, output in zip(prompts, together, strict=True):
            assert len(output) == TOKENS
            assert greedy_departures(reference, prompt, output) == []
        warm = await all_at_once(stack.client, prompts[-6:])
        assert warm == together[-6:]
        seeded = await all_at_once(stack.client, prompts[:16], temperature=0.9, top_p=0.95, seed=1234)
        assert seeded != together[:16]
        alone = [await stack.client.tokens(prompts[i], max_tokens=TOKENS) for i in (0, 9, 23)]
        assert [answer.token_ids for answer in alone] == [together[i] for i in (0, 9, 23)]
        lone = await stack.client.tokens(prompts[3], max_tokens=TOKENS, temperature=0.9, top_p=0.95, seed=1234)
        assert lone.token_ids == seeded[3]
        assert alone[0].finish.prefill_worker != alone[0].finish.decode_worker
        await stack.whole()
    for flags in (("--token-budget", "48", "--page-size", "32"), ("--prefill", "0", "--decode", "0", "--both", "1")):
        async with launch("--model", str(smollm2_dir), *FLAGS, *flags) as stack:
            chosen = [0, 5, 9, 13, 17, 20, 22, 23]
            assert await all_at_once(stack.client, [prompts[i] for i in chosen]) == [together[i] for i in chosen]
            again = await all_at_once(stack.client, prompts[:4], temperature=0.9, top_p=0.95, seed=1234)
            assert again == seeded[:4]
            await stack.whole()
