"""Prompts are computed where that costs less, by what was measured, and each answer carries the figures."""

import asyncio
import re
from pathlib import Path

from .harness import Launch, Stack, token_request
from .test_prefix_routing import cached_pages

FLAGS = ("--dtype", "float32", "--page-size", "16", "--kv-memory", "64MiB", "--threads", "1", "--disaggregate", "auto")
STREAMS = 12


async def known(stack: Stack, pages: int) -> None:
    """The decode worker told that it has so many pages cached; with that goes what it and the other one measured."""
    async with asyncio.timeout(20):
        while (await cached_pages(stack))["decode-0"] < pages:
            await asyncio.sleep(0.3)
    await asyncio.sleep(1.1)  # a status of each: they come once a second


async def test_by_cost(launch: Launch, tiny_dir: Path) -> None:
    async with launch("--model", str(tiny_dir), *FLAGS) as stack:
        await stack.joined(prefill=1, decode=1)
        prompt = [7 + i % 50 for i in range(40)]
        first = await stack.client.tokens(prompt, max_tokens=400)
        assert "as nothing is measured yet" in first.finish.route
        assert (first.finish.prefill_worker, first.finish.decode_worker) == ("prefill-0", "decode-0")
        await known(stack, 25)

        # The decode worker has the whole conversation, the prefill worker its beginning.
        turn = await stack.client.tokens([*prompt, *first.token_ids[:380]], max_tokens=20)
        assert "computed by decode-0: prefill-0 would cost" in turn.finish.route, turn.finish.route
        assert turn.finish.prefill_worker == turn.finish.decode_worker == "decode-0"
        assert turn.token_ids == first.token_ids[380:]

        # Many streams would wait while it computed a prompt that nobody has.
        calls = [stack.client.call(token_request([90 + i] * 3, max_tokens=1000)) for i in range(STREAMS)]
        for call in calls:
            await anext(aiter(call))
        fresh = await stack.client.tokens([9 + i % 70 for i in range(1, 600)], max_tokens=3)
        assert "computed by prefill-0: prefill-0 would cost" in fresh.finish.route, fresh.finish.route
        delayed = re.search(r"(\d+) streams delayed", fresh.finish.route)
        assert delayed is not None, fresh.finish.route
        assert int(delayed[1]) > STREAMS // 2
        assert (fresh.finish.prefill_worker, fresh.finish.decode_worker) == ("prefill-0", "decode-0")
        for call in calls:
            call.cancel()
        await stack.whole()
