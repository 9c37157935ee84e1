"""Whatever the Open Inference door is sent, it answers or refuses by a documented status, and loses nothing."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from ...cluster import cluster, text_request, token_ids
from ...oip_fuzz import fuzz
from ...stand_in_worker import Script, StandIn


async def play(model: Path, examples: int) -> Counter[str]:
    """Sends generated requests, and then a plain one that must be served as ever."""
    workers = StandIn("prefill", "p0"), StandIn("decode", "d0", Script(pause_s=0.001))
    async with cluster(model, *workers) as it:
        seen = await asyncio.to_thread(fuzz, it.address, examples)
        await it.idle()
        assert token_ids(await it.collect(text_request(max_tokens=4)))
        await it.idle()
    return seen


async def test_a_few_requests_of_any_kind(tiny_llama_dir: Path) -> None:
    await play(tiny_llama_dir, 25)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_requests_of_any_kind(tiny_llama_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = await play(tiny_llama_dir, 700)
    for ending in ("one OK", "stream OK", "one INVALID_ARGUMENT", "stream INVALID_ARGUMENT"):
        assert seen[ending] > 25, seen
    assert "failed:" not in caplog.text
