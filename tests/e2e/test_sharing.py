"""Requests that arrive together and begin alike: the beginning is computed once, and sent once to each decoder."""

import asyncio
import random

from .harness import Launch

PAGE = 16
PREFIX, TAIL, REQUESTS, OUTPUT = 1500, 24, 64, 8


async def test_sixty_four_cold_twins(launch: Launch, tiny_dir) -> None:
    """1P2D, one cold prefix of 1,500 tokens: one prefill of it, one transfer to each decode worker, counted."""
    chance = random.Random(7)
    prefix = [chance.randrange(3, 259) for _ in range(PREFIX)]
    prompts = [prefix + [chance.randrange(3, 259) for _ in range(TAIL)] for _ in range(REQUESTS)]
    flags = ("--decode", "2", "--kv-memory", "64MiB", "--dtype", "float32", "--page-size", str(PAGE))
    async with launch("--model", str(tiny_dir), *flags) as stack:
        before = {name: await stack.status(name) for name in stack.workers()}
        answers = await asyncio.gather(*(stack.client.tokens(prompt, max_tokens=OUTPUT) for prompt in prompts))
        await stack.whole()
        after = {name: await stack.status(name) for name in stack.workers()}
        computed = after["prefill-0"].prefilled_tokens - before["prefill-0"].prefilled_tokens
        pushed = after["prefill-0"].pushed_pages - before["prefill-0"].pushed_pages
        decoders = {answer.finish.decode_worker for answer in answers}
        # Each twin computes its own tail, and what of the prefix lies in a page that the tail begins in.
        own = TAIL + PREFIX % PAGE
        assert computed <= PREFIX + REQUESTS * own
        assert computed < 2 * PREFIX + REQUESTS * TAIL, "the prefix was computed more than once"
        tail_pages = -(-(PREFIX + TAIL) // PAGE) - PREFIX // PAGE
        assert pushed <= len(decoders) * (PREFIX // PAGE) + REQUESTS * tail_pages, "the prefix was sent more than once"
        assert sum(answer.finish.usage.cached_tokens >= PREFIX - PAGE for answer in answers) >= REQUESTS - 1
        alone = await stack.client.tokens(prompts[5], max_tokens=OUTPUT)
        assert alone.token_ids == answers[5].token_ids
