"""2P2D under load while its processes are killed and frozen: every output is the fault-free one, nothing is left over.

On a GPU (`-m gpu`) in bf16, on real weights and batch-invariant: there too every token is the fault-free one.
The seed is printed and can be given (TWOSTROKE_SOAK_SEED); it fixes requests, arrivals and faults, not their timing.
KV goes by the transport that TWOSTROKE_SOAK_TRANSPORT names (auto). Pools are so small that sequences are preempted.
"""

import asyncio
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from twostroke.engine.config import EngineOptions
from twostroke.engine.request import FinishReason, Token
from twostroke.v1 import inference_pb2 as pb

from . import harness
from .harness import Answer, Launch
from .soak import DECK, Soak, dealt
from .soak_work import BARE, Expected, fault_free, make_tasks

ALL = ("--prefill", "2", "--decode", "2", "--max-attempts", "50", "--replay-wait-s", "60", "--drain-s", "10")
FLAGS = (*ALL, "--dtype", "float32", "--kv-memory", "3MiB", "--token-budget", "128", "--silence-s", "2")
FLAGS += ("--ready-s", "30")  # a process that is frozen while it starts is ended only then
DEVICE = os.environ.get("TWOSTROKE_TEST_DEVICE", "cuda")
ON_GPU = DEVICE != "cpu"
GPU = EngineOptions(
    device=DEVICE, dtype="bfloat16" if ON_GPU else "float32", page_size=16, kv_memory=256 << 20, batch_invariant=True
)
GPU_FLAGS = (*ALL, "--device", DEVICE, "--dtype", GPU.dtype, "--page-size", "16", "--kv-memory", "96MiB")
GPU_FLAGS += ("--batch-invariant", "--max-batch", "32", "--token-budget", "512", "--gpu-memory", "0.2")
GPU_FLAGS += ("--silence-s", "4", "--ready-s", "60")
GPU_S = float(os.environ.get("TWOSTROKE_SOAK_S", "150"))
START_S = 400.0  # of a GPU's kernels, compiled at the first start
SHORT_S = 60.0
LONG_S = float(os.environ.get("TWOSTROKE_SOAK_S", "900"))
LONGEST = 960  # output tokens
TRANSPORT = os.environ.get("TWOSTROKE_SOAK_TRANSPORT", "auto")


def _seed(default: int) -> int:
    return int(os.environ.get("TWOSTROKE_SOAK_SEED", default))


def _left_of(pids: set[int]) -> Iterator[str]:
    """Of these processes, those of ours that are still there."""
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except FileNotFoundError:
            continue
        if b"twostroke" in words:
            yield f"{pid}: {words!r}"


async def _soak(
    launch: Launch,
    model_dir: Path,
    shm_dir: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    seconds: float,
    tasks: int,
    flags: tuple[str, ...] = FLAGS,
    options: EngineOptions = BARE,
    transport: str = "shm" if TRANSPORT == "auto" else TRANSPORT,
    rhythm: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Runs it to the end, tells what came of it, and looks whether anything is left. `options`: of the engine that
    gives the fault-free outputs. `transport`: by which KV must have gone. `rhythm`: where `Soak`'s own is too fast."""
    seed = _seed(3 if seconds == SHORT_S else random.SystemRandom().randrange(1 << 31))
    work = make_tasks(seed, tasks, LONGEST)
    expected = await asyncio.to_thread(fault_free, model_dir, work, options)
    flags = ("--model", str(model_dir), *flags, "--transport", TRANSPORT, "--shm-dir", str(shm_dir))
    async with launch(*flags) as stack:
        soak = Soak(stack, work, expected, seed, **rhythm)
        try:
            await soak.run(seconds)
        finally:
            with capsys.disabled():
                print("\n" + soak.report())
        assert not soak.problems, "\n".join(soak.problems[:20])
        await stack.whole()
    assert not list(shm_dir.glob("twostroke*")), "a pool file was left behind"
    assert not list(_left_of({event["pid"] for event in stack.events if event["event"] == "started"}))
    assert sum(stream.end == "finished" for stream in soak.ended) > seconds / 2, "hardly anything was served"
    assert any(stream.replays for stream in soak.ended), "no fault met a stream"
    assert soak.transports() == {transport}
    assert soak.total("preemptions"), "no sequence lost its pages"
    if transport != "nixl":  # a broken connection's copies count as damaged
        assert not soak.total("damaged_pages")


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_minute_of_faults(launch: Launch, tiny_dir, tmp_path: Path, capsys) -> None:
    """About one of every fault."""
    await _soak(launch, tiny_dir, tmp_path, capsys, seconds=SHORT_S, tasks=48)


@pytest.mark.soak
@pytest.mark.timeout(LONG_S + 900)
async def test_a_long_soak(launch: Launch, tiny_dir, tmp_path: Path, capsys) -> None:
    """TWOSTROKE_SOAK_S seconds (900) of it, by another seed each time."""
    await _soak(launch, tiny_dir, tmp_path, capsys, seconds=LONG_S, tasks=256)


@pytest.mark.gpu
@pytest.mark.timeout(GPU_S + 1200)
@pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="no CUDA device")
async def test_minutes_of_faults_on_a_gpu(
    launch: Launch, smollm2_dir: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TWOSTROKE_SOAK_S seconds (150). TWOSTROKE_TEST_DEVICE=cpu tests the test."""
    monkeypatch.setattr(harness, "START_S", START_S)
    transport = "cuda_ipc" if ON_GPU else "shm"
    await _soak(
        launch,
        smollm2_dir,
        tmp_path,
        capsys,
        seconds=GPU_S,
        tasks=96,
        flags=GPU_FLAGS,
        options=GPU,
        transport=transport,
        rhythm={"pause_s": (4.0, 12.0), "fenced_s": 100.0},  # a worker starts for some 20 s
    )


# The soak's own parts


def test_every_fault_is_dealt_once_a_round() -> None:
    cards = dealt(random.Random(1))
    for _ in range(3):
        assert sorted(next(cards) for _ in DECK) == sorted(DECK)


def test_the_tasks_follow_the_seed_and_are_of_every_kind() -> None:
    tasks = make_tasks(3, 48, LONGEST)
    assert tasks == make_tasks(3, 48, LONGEST)
    assert tasks != make_tasks(4, 48, LONGEST)
    assert len({task.params.seed for task in tasks}) == 48
    for kind in (
        lambda task: task.samples > 1,
        lambda task: task.params.temperature == 0,
        lambda task: task.params.repetition_penalty > 1,
        lambda task: task.params.logprobs is not None,
        lambda task: not task.params.ignore_eos,
        lambda task: task.params.max_tokens == 1,
        lambda task: task.params.max_tokens == LONGEST,
        lambda task: len(task.prompt) > 450,
        lambda task: len(task.prompt) < 16,
    ):
        assert any(map(kind, tasks))


def test_the_bare_engine_gives_every_answer(tiny_dir) -> None:
    tasks = make_tasks(5, 12, 32)
    expected = fault_free(tiny_dir, tasks)
    for task, samples in zip(tasks, expected, strict=True):
        assert len(samples) == task.samples
        for sample in samples:
            assert sample.reason is not None
            assert 1 <= len(sample.tokens) <= task.params.max_tokens
            assert (len(sample.tokens) == task.params.max_tokens) or sample.reason is FinishReason.STOP

    def ids(outputs: list[list[Expected]]) -> list[list[list[int]]]:
        return [[[token.token_id for token in sample.tokens] for sample in samples] for samples in outputs]

    assert ids(fault_free(tiny_dir, tasks[::-1])[::-1]) == ids(expected)  # in other batches


def _answer(ids: list[int], *, reason: int = 2, logprob: float = -0.5, finish: bool = True) -> Answer:
    """An answer of two messages, with log-probabilities."""
    messages = [
        pb.GenerateResponse(
            first_index=index, token_ids=[token], logprobs=[pb.TokenLogprob(token_id=token, logprob=logprob)]
        )
        for index, token in enumerate(ids)
    ]
    if finish:
        messages[-1].finish.reason = pb.FinishReason.ValueType(reason)
        messages[-1].finish.usage.output_tokens = len(ids)
    return Answer(ids, "", messages)


@pytest.mark.parametrize(
    ("answer", "departs"),
    [
        (Answer(), False),
        (_answer([7, 8]), False),
        (_answer([7], finish=False), False),
        (_answer([7]), True),
        (_answer([8], finish=False), True),
        (_answer([7, 9]), True),
        (_answer([7, 8, 9], finish=False), True),
        (_answer([7, 8], reason=1), True),
        (_answer([7, 8], logprob=-0.51), True),
        (Answer([7, 8], "", [pb.GenerateResponse(token_ids=[7, 8])]), True),
    ],
)
def test_an_answer_that_departs_is_seen(answer: Answer, departs: bool) -> None:
    expected = Expected([Token(7, ((7, -0.5),)), Token(8, ((8, -0.5),))], FinishReason.LENGTH)
    assert bool(expected.departure(answer)) is departs
