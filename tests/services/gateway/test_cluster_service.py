"""The cluster API and its command, on a real gateway with stand-in workers."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from twostroke.errors import InvalidRequest, Unavailable, WorkerNotFound, WrongState
from twostroke.services.client.cluster_client import ClusterClient
from twostroke.services.identity import draw_identity
from twostroke.v1 import cluster_pb2 as pb
from twostroke.v1 import cluster_pb2_grpc
from twostroke.v1 import worker_pb2 as wpb

from ..cluster import Cluster, cluster, refusal, text_request, token_ids, until
from ..stand_in_worker import Script, StandIn


async def info(it: Cluster, name: str) -> pb.WorkerInfo:
    async with ClusterClient(it.address) as admin:
        return next(worker for worker in await admin.workers() if worker.name == name)


async def command(it: Cluster, *words: str, by_variable: bool = False) -> tuple[int, str]:
    """(exit code, output) of `twostroke workers`. `by_variable`: it finds the gateway's address in its environment."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "twostroke.services.cli", "workers", *words),
        *(() if by_variable else ("--address", it.address)),
        env={**os.environ, "TWOSTROKE_ADDRESS": it.address if by_variable else "127.0.0.1:1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_the_list_says_who_is_there_and_why_others_are_not(tiny_llama_dir: Path) -> None:
    workers = [StandIn("prefill", "p0"), StandIn("decode", "d0", Script(mute_after=3), pages=77)]
    other = StandIn("decode", "d1", kv_dtype="bfloat16")
    async with cluster(tiny_llama_dir, *workers) as it:
        call = it.stub.Generate(text_request())
        await call.read()
        workers[1].status(running=3, waiting=2, free_pages=50, prefilled_tokens=9, pushed_pages=8, tickets=7)
        await until(lambda: it.gateway.fleet.session(workers[1].identity.incarnation).status.running == 3)
        p, d = await info(it, "p0"), await info(it, "d0")
        assert (p.role, p.state, p.address) == (pb.WORKER_ROLE_PREFILL, pb.WORKER_STATE_READY, workers[0].address)
        assert (d.role, d.pages, d.free_pages, d.running, d.waiting) == (pb.WORKER_ROLE_DECODE, 77, 50, 3, 2)
        assert (d.prefilled_tokens, d.pushed_pages, d.tickets, d.requests) == (9, 8, 7, 1)
        assert d.incarnation == workers[1].identity.incarnation
        call.cancel()
        await workers[0].stop()
        await until(lambda: len(it.gateway.fleet.loads()) == 1)
        gone = await info(it, "p0")
        assert (gone.state, gone.role) == (pb.WORKER_STATE_ABSENT, pb.WORKER_ROLE_PREFILL)
        assert gone.reason
        code, output = await command(it, "list", "--json")
        assert code == 0
        listed = {worker["name"]: worker for worker in json.loads(output)}
        assert (listed["d0"]["role"], listed["d0"]["state"]) == ("decode", "ready")
        assert (listed["p0"]["state"], listed["p0"]["incarnation"]) == ("absent", "0" * 16)
        code, output = await command(it, "list", by_variable=True)
        assert code == 0
        assert "d0" in output
        assert "absent" in output
    async with cluster(tiny_llama_dir, workers[1], other, connected=1) as it:
        refused: list[pb.WorkerInfo] = []
        async with ClusterClient(it.address) as admin:
            while not refused:
                await asyncio.sleep(0.02)
                refused = [worker for worker in await admin.workers() if "refused" in worker.reason]
        assert "kv_dtype" in refused[0].reason


async def test_the_list_says_where_time_and_memory_go(tiny_llama_dir: Path) -> None:
    worker = StandIn("both", "b0")
    plain = worker.hello

    def hello() -> wpb.WorkerHello:
        message = plain()
        message.start_seconds.update({"weights": 2.5, "graphs": 7.0})
        message.memory_bytes.update({"kv": 1 << 40, "weights": 5})
        return message

    worker.hello = hello  # type: ignore[method-assign]
    async with cluster(tiny_llama_dir, worker) as it:
        early = await info(it, "b0")
        assert (early.unused_share, early.mean_length, early.suited_page_size) == (0, 0, 0)
        worker.status(covered_positions=200, unused_positions=50, mean_length=3000.0, sequence=1 << 40)
        await until(lambda: it.gateway.fleet.session(worker.identity.incarnation).status.sequence == 1 << 40)
        worker.frozen = True  # its beats tell less
        code, output = await command(it, "list", "--json")
        assert code == 0
        told = json.loads(output)[0]
        assert (told["unused_share"], told["mean_length"], told["suited_page_size"]) == (0.25, 3000, 64)
        assert told["page_size"] == 16
        assert told["start_seconds"] == {"weights": 2.5, "graphs": 7.0}
        assert told["memory_bytes"] == {"kv": 1 << 40, "weights": 5}


async def test_drain_and_undrain(tiny_llama_dir: Path) -> None:
    workers = [StandIn("both", "b0"), StandIn("both", "b1")]
    async with cluster(tiny_llama_dir, *workers) as it, ClusterClient(it.address) as admin:
        told = await admin.drain("b0", True, 2.5)
        assert told.state == pb.WORKER_STATE_READY  # before
        await until(lambda: workers[0].orders)
        assert workers[0].orders[0].drain == wpb.Drain(drain=True, within_ms=2500)
        await until(lambda: it.gateway.fleet.loads()[0].draining or it.gateway.fleet.loads()[1].draining)
        assert (await info(it, "b0")).state == pb.WORKER_STATE_DRAINING
        for _ in range(4):
            assert (await it.collect(text_request()))[-1].finish.decode_worker == "b1"
        await admin.drain(workers[0].address, False, 0.0)
        await until(lambda: not any(load.draining for load in it.gateway.fleet.loads()))
        code, output = await command(it, "drain", "b1", "--within", "3")
        assert (code, "b1 drains" in output) == (0, True)
        code, output = await command(it, "undrain", "b1")
        assert code == 0


async def test_a_draining_worker_is_known_as_such_from_its_hello(tiny_llama_dir: Path) -> None:
    worker = StandIn("both", "b0")
    plain = worker.hello

    def hello() -> wpb.WorkerHello:
        message = plain()
        message.draining = True
        return message

    worker.hello = hello  # type: ignore[method-assign]
    worker.draining = True
    async with cluster(tiny_llama_dir, worker) as it:
        assert it.gateway.fleet.loads()[0].draining
        assert (await info(it, "b0")).state == pb.WORKER_STATE_DRAINING


async def test_orders_that_cannot_be_followed(tiny_llama_dir: Path) -> None:
    workers = [StandIn("prefill", "p0"), StandIn("decode", "twin"), StandIn("decode", "twin")]
    async with cluster(tiny_llama_dir, *workers) as it, ClusterClient(it.address) as admin:
        with pytest.raises(WorkerNotFound, match=r"'nobody'.*p0, twin"):
            await admin.drain("nobody", True, 0.0)
        with pytest.raises(InvalidRequest, match="several workers"):
            await admin.drain("twin", True, 0.0)
        stub = cluster_pb2_grpc.ClusterStub(it.channel)
        for request in (pb.SetRoleRequest(worker="p0"), pb.SetRoleRequest(worker="p0", role=9)):  # type: ignore[arg-type]
            assert (await refusal(stub.SetRole(request))).code() is grpc.StatusCode.INVALID_ARGUMENT
        await workers[2].stop()
        await it.ready(2)
        with pytest.raises(WrongState, match="only worker that decodes"):
            await admin.become(workers[1].address, pb.WORKER_ROLE_PREFILL, False, 0.0)
        assert not any(worker.orders for worker in workers)
        await admin.become(workers[1].address, pb.WORKER_ROLE_PREFILL, True, 0.0)
        await until(lambda: workers[1].orders)
        code, output = await command(it, "role", "nobody", "decode")
        assert (code, "no worker 'nobody'" in output) == (1, True)
    with pytest.raises(Unavailable, match="no gateway answers"):
        async with ClusterClient("127.0.0.1:1") as admin:
            await admin.workers()


async def test_a_role_is_waited_for(tiny_llama_dir: Path) -> None:
    """The worker drains, goes, and comes back as another process at its address; streams go on at the other one."""
    workers = [StandIn("decode", "d0", Script(pause_s=0.02)), StandIn("decode", "d1", Script(pause_s=0.02))]
    async with cluster(tiny_llama_dir, *workers) as it, ClusterClient(it.address) as admin:

        async def follow() -> None:
            await until(lambda: workers[0].orders)
            await workers[0].stop()
            workers[0].role = "prefill"
            workers[0].identity = draw_identity("d0", "test-host")
            await asyncio.sleep(0.2)
            await workers[0].start(workers[0].address)

        streams = [asyncio.create_task(it.collect(text_request(f"prompt {i}"))) for i in range(6)]
        await until(lambda: sum(len(worker.submits) for worker in workers) == 6)
        following = asyncio.create_task(follow())
        now = await admin.become("d0", pb.WORKER_ROLE_PREFILL, False, 20.0)
        await following
        assert workers[0].orders[0].set_role.role == wpb.ROLE_PREFILL
        assert (now.role, now.state) == (pb.WORKER_ROLE_PREFILL, pb.WORKER_STATE_READY)
        answers: list[Any] = await asyncio.gather(*streams)
        assert all(len(token_ids(answer)) == 31 for answer in answers)
        with pytest.raises(Unavailable, match="not back"):
            await admin.become("d0", pb.WORKER_ROLE_BOTH, False, 0.3)
