"""2P2D under load, while any process is killed and frozen at any moment."""

import os
import random
from pathlib import Path

import pytest

from .harness import Launch
from .soak import FLAGS, Soak


async def _soak(launch: Launch, model: Path, shm: Path, *, seconds: float, rate: float, seed: int) -> Soak:
    async with launch("--model", str(model), *FLAGS, "--shm-dir", str(shm)) as stack:
        soak = Soak(stack, random.Random(seed))
        await soak.run(seconds, rate)
        print(f"seed {seed}: {dict(soak.counts)}")
        return soak


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_minute_of_faults(launch: Launch, tiny_dir, tmp_path: Path) -> None:
    soak = await _soak(launch, tiny_dir, tmp_path, seconds=60, rate=4, seed=3)
    assert soak.counts["answered"] > 100
    assert soak.counts["kill"]


@pytest.mark.soak
async def test_hours_of_faults(launch: Launch, tiny_dir, tmp_path: Path) -> None:
    """TWOSTROKE_SOAK_S seconds, an hour unless told; TWOSTROKE_SOAK_SEED for another course of events."""
    seconds = float(os.environ.get("TWOSTROKE_SOAK_S", "3600"))
    seed = int(os.environ.get("TWOSTROKE_SOAK_SEED", "0")) or random.randrange(1, 1 << 30)
    soak = await _soak(launch, tiny_dir, tmp_path, seconds=seconds, rate=4, seed=seed)
    assert soak.counts["answered"] > seconds
