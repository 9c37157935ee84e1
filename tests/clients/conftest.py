"""Fixtures of the tests that run clients of other people's making, unmodified, each in an environment of its own."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..e2e.conftest import launch as launch
from ..e2e.conftest import smollm2_dir as smollm2_dir
from ..e2e.conftest import tiny_dir as tiny_dir

BUILT = Path(__file__).parent.parent.parent / ".clients"


@dataclass(frozen=True)
class Done:
    """A program that ended."""

    code: int
    output: str
    errors: str


async def run(*command: str | Path, timeout: float = 100.0, **env: str) -> Done:
    """Runs a program to its end; kills it after `timeout` seconds, or when the test ends before."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=env or None
    )
    try:
        async with asyncio.timeout(timeout):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Done(process.returncode or 0, output.decode(), errors.decode())


@pytest.fixture(scope="session")
def environment() -> Callable[[str], Path]:
    """The folder of a client's environment, by name; the test is skipped where it has not been built."""

    def find(name: str) -> Path:
        folder = BUILT / name
        if not (folder / ".built").exists():
            pytest.skip(f".clients/{name} is missing: make clients")
        return folder

    return find
