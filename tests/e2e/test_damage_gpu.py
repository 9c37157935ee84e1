"""A whole stack whose workers share a GPU, over a transport that damages pages there: clients get the right tokens.

TWOSTROKE_TEST_DEVICE=cpu tests the test. The engines are batch-invariant, so that in bf16 every token is the one that
an engine without neighbours and faults gives.
"""

import asyncio
import os
from pathlib import Path

import pytest
import torch

from twostroke.engine.config import EngineOptions

from ..tiny import make_tiny_llama
from . import harness
from .harness import Launch
from .soak_work import fault_free, make_tasks
from .test_damage import ROOT, ask

DEVICE = os.environ.get("TWOSTROKE_TEST_DEVICE", "cuda:0")
ON_GPU = DEVICE != "cpu"
DTYPE = "bfloat16" if ON_GPU else "float32"
FLAGS = ("--device", DEVICE, "--dtype", DTYPE, "--page-size", "16", "--kv-memory", "3MiB", "--max-batch", "32")
FLAGS += (
    "--token-budget",
    "64",
    "--max-attempts",
    "30",
    "--gpu-memory",
    "0.3",
    "--batch-invariant",
    "--max-queue-tokens",
    "100000",
)
START_S = 400.0  # kernels are compiled at the first start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="no CUDA device"),
]


async def test_clients_never_see_it(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = make_tiny_llama(tmp_path / "model", hidden=256)  # heads of 64, as kernels take them
    tasks = make_tasks(12, 60, 200)
    options = EngineOptions(device=DEVICE, dtype=DTYPE, page_size=16, kv_memory=64 << 20, batch_invariant=True)
    expected = await asyncio.to_thread(fault_free, model_dir, tasks, options)
    monkeypatch.setattr(harness, "START_S", START_S)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "e2e" / "faulty"), str(ROOT)]))
    monkeypatch.setenv("DAMAGED_SHARE", "0.15")
    monkeypatch.setenv("DAMAGE_SEED", "6")
    async with launch("--model", str(model_dir), *FLAGS, "--shm-dir", str(tmp_path)) as stack:
        await stack.joined(prefill=1, decode=1)
        replies = await asyncio.gather(*(ask(stack, task) for task in tasks))
        for answers, wanted in zip(replies, expected, strict=True):
            for answer, sample in zip(answers, wanted, strict=True):
                assert answer.messages[-1].HasField("finish")
                assert not sample.departure(answer)
        await stack.whole()
        decode, prefill = await stack.status("decode-0"), await stack.status("prefill-0")
        assert {pair.transport for pair in prefill.pairs} == {"cuda_ipc" if ON_GPU else "shm"}
        assert decode.damaged_pages > decode.resent_pages > 0
        assert decode.damaged_tickets > 0
        assert any(answer.finish.replays for answers in replies for answer in answers)
        print(f"{decode.damaged_pages} pages of {prefill.pushed_pages} damaged, {decode.damaged_tickets} prompts anew")
