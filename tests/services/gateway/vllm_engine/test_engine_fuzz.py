"""Whatever the engine door is sent, it answers or refuses by a documented status, and loses nothing."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from ...engine_fuzz import fuzz
from .engine_client import decode, ends, engine, prefill, request


async def play(model: Path, examples: int) -> Counter[str]:
    """Sends generated requests, and then a plain one that must be served as ever."""
    async with engine(model, prefill(), decode(pause_s=0.003)) as it:
        seen = await asyncio.to_thread(fuzz, it.it.address, examples, 30.0, scored=False)
        await it.it.idle()
        assert ends(await it.all(request(max_tokens=4)))[0].finish_reason == "length"
        await it.it.idle()
    return seen


async def test_a_few_requests_of_any_kind(tiny_llama_dir: Path) -> None:
    await play(tiny_llama_dir, 15)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_requests_of_any_kind(tiny_llama_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = await play(tiny_llama_dir, 400)
    for ending, least in (("OK", 100), ("INVALID_ARGUMENT", 100), ("length", 50), ("abort", 5)):
        assert seen[ending] > least, seen
    assert "failed:" not in caplog.text
