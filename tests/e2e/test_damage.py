"""A whole stack whose transport damages pages: clients get what a bare engine would have answered, in fp32."""

import asyncio
from pathlib import Path

import pytest

from .harness import Answer, Launch, Stack
from .soak_work import Task, fault_free, make_tasks

ROOT = Path(__file__).parents[2]
FLAGS = ("--dtype", "float32", "--kv-memory", "3MiB", "--max-attempts", "30", "--token-budget", "64")


async def ask(stack: Stack, task: Task) -> list[Answer]:
    """One answer a sample."""
    answers = [Answer() for _ in range(task.samples)]
    async for message in stack.client.call(task.message()):
        answers[message.sample].take(message)
    return answers


async def test_clients_never_see_it(
    launch: Launch, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = make_tasks(11, 40, 200)
    expected = await asyncio.to_thread(fault_free, tiny_dir, tasks)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests' / 'e2e' / 'faulty'}:{ROOT}")
    monkeypatch.setenv("DAMAGED_SHARE", "0.15")
    monkeypatch.setenv("DAMAGE_SEED", "4")
    async with launch("--model", str(tiny_dir), *FLAGS, "--shm-dir", str(tmp_path)) as stack:
        await stack.joined(prefill=1, decode=1)
        replies = await asyncio.gather(*(ask(stack, task) for task in tasks))
        for answers, wanted in zip(replies, expected, strict=True):
            for answer, sample in zip(answers, wanted, strict=True):
                assert answer.messages[-1].HasField("finish")
                assert not sample.departure(answer)
        await stack.whole()
        status = await stack.status("decode-0")
        assert status.damaged_pages > status.damaged_tickets > 0
        assert any(answer.finish.replays for answers in replies for answer in answers)
