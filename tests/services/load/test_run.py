"""Loads against a real gateway in front of stand-in workers: counts, structure, and that arrivals wait for nobody."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from twostroke.services.client.client import Client
from twostroke.services.load.bench import limits_of
from twostroke.services.load.lengths import Uniform
from twostroke.services.load.plan import LoadPlan, LoadSpec
from twostroke.services.load.record import Record
from twostroke.services.load.run import LoadRun, Options
from twostroke.v1 import worker_pb2

from ..cluster import Cluster, cluster, until
from ..stand_in_worker import Script, StandIn

SPEC = LoadSpec(Uniform(5, 40), Uniform(2, 9), seed=11)
LONG = list(range(10, 200))


def workers(**script: Any) -> tuple[StandIn, StandIn]:
    """A prefill and a decode worker that make long outputs."""
    return (
        StandIn("prefill", "p-0", Script(tokens=LONG, **script)),
        StandIn("decode", "d-0", Script(tokens=LONG, **script)),
    )


@asynccontextmanager
async def load(
    it: Cluster, *, spec: LoadSpec = SPEC, channels: int = 1, **options: Any
) -> AsyncIterator[tuple[LoadRun, LoadPlan, list[Record]]]:
    """A run against the cluster's gateway, its plan, and the records that it tells."""
    async with Client(it.address, channels=channels) as client:
        plan, records = LoadPlan(spec, limits_of(await client.model())), []
        yield LoadRun(client, plan, Options(**{"timeout_s": 30, **options}), records.append), plan, records
    await it.idle()


@pytest.mark.parametrize("told", [True, False])
async def test_a_closed_load_is_the_plan(tiny_llama_dir: Path, told: bool) -> None:
    """Whether the prefill worker's token 0 comes, or only the decode worker's."""
    p, d = workers()
    p.script.first_tokens = told
    async with (
        cluster(tiny_llama_dir, p, d) as it,
        load(it, requests=40, channels=3, temperature=0.5, priority=5) as (run, plan, got),
    ):
        await run.closed(4)
        tally = run.tally
        assert (tally.sent, tally.succeeded, tally.failed, tally.cancelled, run.running) == (40, 40, 0, 0, 0)
        assert tally.complete
        wanted = [plan.request(index) for index in range(40)]
        assert sorted(record.index for record in got) == list(range(40))
        assert {record.index: record.tokens for record in got} == {r.index: r.max_tokens for r in wanted}
        assert tally.input_tokens == sum(len(request.prompt) for request in wanted)
        assert tally.output_tokens == sum(request.max_tokens for request in wanted)
        assert tally.itl.count == sum(request.max_tokens - 2 for request in wanted)
        assert tally.gap01.count == tally.tpot.count == tally.ttft.count == tally.end_to_end.count == 40
        assert tally.lateness.count == 0
        assert tally.cached_tokens == 40 * 5  # what the stand-in says
        prompts = {tuple(request.prompt): request for request in wanted}
        assert len(d.submits) == 40
        for submit in d.submits:
            request = prompts.pop(tuple(submit.prompt_ids))
            params = submit.params
            assert (params.max_tokens, params.seed, params.ignore_eos) == (request.max_tokens, request.seed, True)
            assert params.temperature == 0.5
            assert submit.priority == 5
        assert not {0, 1, 2} & {token for submit in d.submits for token in submit.prompt_ids}


async def test_a_closed_load_keeps_its_concurrency(tiny_llama_dir: Path) -> None:
    p, d = workers()
    p.script.mute_after = d.script.mute_after = 1
    async with cluster(tiny_llama_dir, p, d) as it, load(it, requests=50) as (run, _, got):
        task = asyncio.create_task(run.closed(7))
        await until(lambda: len(d.live) == 7)
        await asyncio.sleep(0.1)
        assert (run.running, len(d.submits), run.tally.sent, got) == (7, 7, 7, [])
        run.stop()
        await task
        assert (run.tally.cancelled, run.tally.succeeded, run.tally.failed) == (7, 0, 0)
        assert not run.tally.complete


async def test_the_order_does_not_depend_on_the_concurrency(tiny_llama_dir: Path) -> None:
    p, d = workers()
    seen = []
    for concurrency in (1, 5):
        async with cluster(tiny_llama_dir, p, d) as it, load(it, requests=12) as (run, _, _):
            await run.closed(concurrency)
        seen.append(sorted(tuple(submit.prompt_ids) for submit in d.submits))
        d.submits.clear()
    assert seen[0] == seen[1]
    assert len(seen[0]) == 12


async def test_an_open_load_does_not_wait_for_answers(tiny_llama_dir: Path) -> None:
    p, d = workers()
    p.script.mute_after = d.script.mute_after = 1  # no answer ends
    async with cluster(tiny_llama_dir, p, d) as it, load(it, requests=60) as (run, plan, _):
        task = asyncio.create_task(run.open(300.0))
        await until(lambda: run.running == 60)
        assert (run.tally.sent, run.tally.lateness.count) == (60, 60)
        times = [offset for offset, _ in zip(plan.arrivals(300.0), range(60), strict=False)]
        assert time.monotonic() - run.started >= times[-1]
        assert (run.tally.lateness.percentile(0) or 0) >= 0  # nothing is sent before its time
        run.stop()
        await task
        assert run.tally.cancelled == 60


async def test_an_open_load_ends_with_its_time(tiny_llama_dir: Path) -> None:
    p, d = workers()
    async with cluster(tiny_llama_dir, p, d) as it, load(it, duration_s=0.5) as (run, plan, got):
        await run.open(100.0)
        planned = 0
        for offset in plan.arrivals(100.0):
            if offset >= 0.5:
                break
            planned += 1
        assert 0 < run.tally.sent <= planned
        assert run.tally.succeeded == run.tally.sent == len(got)
        assert all(record.scheduled is not None and record.sent >= record.scheduled for record in got)


async def test_a_closed_load_ends_with_its_time(tiny_llama_dir: Path) -> None:
    p, d = workers()
    async with cluster(tiny_llama_dir, p, d) as it, load(it, duration_s=0.3) as (run, _, got):
        await run.closed(2)
        assert run.tally.complete
        assert run.tally.succeeded == len(got) > 0


async def test_what_the_client_will_not_hold_is_not_sent(tiny_llama_dir: Path) -> None:
    p, d = workers()
    p.script.mute_after = d.script.mute_after = 1
    async with cluster(tiny_llama_dir, p, d) as it, load(it, requests=30, max_in_flight=5) as (run, _, got):
        task = asyncio.create_task(run.open(500.0))
        await until(lambda: run.tally.failed == 25)
        assert (run.running, run.tally.sent) == (5, 5)
        assert run.tally.errors == {"NOT_SENT": 25}
        assert {record.status for record in got} == {"NOT_SENT"}
        run.stop()
        await task


async def test_errors_are_counted_by_status(tiny_llama_dir: Path) -> None:
    p, d = workers()
    d.script = Script(tokens=LONG, mute_after=1, fail=(worker_pb2.FAILURE_CODE_INVALID, "it refuses"))
    async with cluster(tiny_llama_dir, p, d) as it, load(it, requests=10) as (run, _, got):
        await run.closed(3)
        assert (run.tally.succeeded, run.tally.failed, run.tally.error_rate) == (0, 10, 1.0)
        (status,) = run.tally.errors
        assert run.tally.errors[status] == 10
        assert "it refuses" in run.tally.messages[status]
        assert run.tally.ttft.count == run.tally.itl.count == run.tally.output_tokens == 0
        assert len(got) == 10


async def test_refusals_and_deadlines(tiny_llama_dir: Path) -> None:
    p, d = workers()
    p.script.mute_after = d.script.mute_after = 1
    async with cluster(tiny_llama_dir, p, d, max_queue=4) as it, load(it, requests=20, timeout_s=3.0) as (run, _, _):
        await run.open(200.0)
        assert run.tally.errors == {"RESOURCE_EXHAUSTED": 16, "DEADLINE_EXCEEDED": 4}
        assert (run.tally.succeeded, run.tally.cancelled, run.running) == (0, 0, 0)


async def test_a_gateway_that_is_gone(tiny_llama_dir: Path) -> None:
    p, d = workers()
    async with cluster(tiny_llama_dir, p, d) as it, Client(it.address) as client:
        plan = LoadPlan(SPEC, limits_of(await client.model()))
        run = LoadRun(client, plan, Options(requests=6, timeout_s=20))
        await it.gateway.stop()
        await run.closed(2)
        assert run.tally.errors == {"UNAVAILABLE": 6}


async def test_warm_up_is_not_of_the_load(tiny_llama_dir: Path) -> None:
    p, d = workers()
    async with cluster(tiny_llama_dir, p, d) as it, load(it, requests=3) as (run, plan, got):
        warm = await run.warm_up(5, 2)
        assert (warm.succeeded, run.tally.sent, got) == (5, 0, [])
        await run.closed(2)
        assert (run.tally.succeeded, len(got)) == (3, 3)
        load_prompts = {tuple(plan.request(index).prompt) for index in range(3)}
        assert [tuple(submit.prompt_ids) in load_prompts for submit in d.submits] == [False] * 5 + [True] * 3


async def test_a_fault_of_the_client_ends_the_run(tiny_llama_dir: Path) -> None:
    p, d = workers()
    async with cluster(tiny_llama_dir, p, d) as it, load(it, requests=9) as (run, _, _):

        class Broken:
            calls = 0

            def start(self, *_: Any) -> Any:
                self.calls += 1
                raise RuntimeError("no calls today")

        broken = run._client = Broken()
        with pytest.raises(RuntimeError, match="no calls today"):
            await run.closed(1)
        assert broken.calls == 1
