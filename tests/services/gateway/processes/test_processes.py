"""`twostroke gateway --processes 2`, as one gateway: limits, Abort, figures; one that is killed, and the end."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twostroke.services.grpc_setup import open_channel
from twostroke.services.security.api_keys import new_key
from twostroke.services.security.limits import Limits
from twostroke.smg import vllm_engine_pb2 as pb
from twostroke.smg import vllm_engine_pb2_grpc
from twostroke.v1 import cluster_pb2, cluster_pb2_grpc

from ...cluster import until
from ...stand_in_worker import Script, StandIn

NAMES = ("doors-0", "doors-1")
FOREVER = 1500  # tokens, with the pause before each
PAUSE_S = 0.1


class Doors:
    """Two processes before a stand-in worker, and a channel to each."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, worker: StandIn, metadata: Any) -> None:
        self.process, self.log, self.worker, self.metadata = process, log, worker, metadata
        self.http = ""
        self.address = ""
        self.channels: dict[str, grpc.aio.Channel] = {}
        self.answers = 0  # of all processes

    def text(self) -> str:
        return self.log.read_text()

    async def told(self, pattern: str, times: int = 1) -> list[Any]:
        """What the log says, as soon as it says so so often."""
        async with asyncio.timeout(60):
            while len(found := re.findall(pattern, self.text())) < times:
                await asyncio.sleep(0.05)
        return found

    def pid(self, name: str) -> int:
        return int(re.findall(rf"process {name}: started \(pid (\d+)\)", self.text())[-1])

    def stub(self, name: str) -> Any:
        return vllm_engine_pb2_grpc.VllmEngineStub(self.channels[name])

    def start(self, name: str, request_id: str, max_tokens: int = FOREVER) -> Any:
        """A stream at a process; its prompt is long enough for a page."""
        request = pb.GenerateRequest(
            request_id=request_id,
            tokenized=pb.TokenizedInput(input_ids=range(5, 25)),
            sampling_params=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            stream=True,
        )
        return self.stub(name).Generate(request, timeout=60, metadata=self.metadata)

    async def begun(self, name: str, request_id: str) -> Any:
        """The same, once a token came."""
        call = self.start(name, request_id)
        assert await call.read() is not grpc.aio.EOF
        return call

    async def find(self, names: Iterable[str]) -> None:
        """Opens connections until there is one to each process; the log says who answered."""
        async with asyncio.timeout(60):
            while missing := [name for name in names if name not in self.channels]:
                number = self.answers
                self.channels["new"] = open_channel(self.address)
                assert (await finish(self.start("new", f"try-{number}", 1))).finish_reason == "length"
                self.answers += 1
                [name] = await self.told(rf" (\S+) \S+lifecycle: request try-{number},")
                channel = self.channels.pop("new")
                if name in missing:
                    self.channels[name] = channel
                else:
                    await channel.close()

    async def figures(self) -> list[dict[str, float]]:
        """Of several scrapes over new connections: whichever process answers."""
        texts = []
        for _ in range(6):
            async with httpx2.AsyncClient() as client:
                answer = await client.get(f"{self.http}/metrics", headers=dict(self.metadata))
            assert answer.status_code == 200
            texts.append(answer.text)
        lines = [[line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#"] for text in texts]
        return [{name: float(value) for name, value in each} for each in lines]


async def finish(call: Any) -> pb.GenerateComplete:
    """The end of a stream."""
    end = pb.GenerateComplete()
    while (message := await call.read()) is not grpc.aio.EOF:
        if message.HasField("complete"):
            end = message.complete
    return end


async def ending(call: Any) -> grpc.StatusCode:
    """The status of a stream, all of which is read."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        await finish(call)
    return await asyncio.wait_for(call.code(), 10)


@asynccontextmanager
async def doors(model: Path, tmp_path: Path, worker: StandIn, **limits: int) -> AsyncIterator[Doors]:
    """Started, and ended by SIGTERM unless the test did so."""
    key, kept = new_key("acme", admin=True, limits=Limits(**limits))
    (tmp_path / "keys").write_text(kept.line() + "\n")
    command = [sys.executable, "-m", "twostroke.services.cli", "gateway", "--processes", "2", "--name", "doors"]
    command += ["--model", str(model), "--listen", "127.0.0.1:0", "--api-keys", str(tmp_path / "keys")]
    command += ["--drain-s", "10", "--workers", await worker.start()]
    log = tmp_path / "log"
    folder = Path(tempfile.mkdtemp(prefix="ts-"))  # not in `tmp_path`: a socket's path must be short
    environment = {**os.environ, "TMPDIR": str(folder)}
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(*command, stderr=errors, env=environment)
    it = Doors(process, log, worker, (("authorization", f"Bearer {key}"),))
    try:
        await it.told(r"gateway process doors-\d: ready", 2)
        [it.address, _] = await it.told(r"gateway: serving \S+ on (\S+)", 2)
        [it.http, _] = await it.told(r"OpenAI API on (\S+)/v1", 2)
        await it.find(NAMES)
        yield it
        for channel in it.channels.values():
            await channel.close()
        if process.returncode is None:
            process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 0
        assert not list(folder.iterdir())
        assert "Traceback" not in it.text()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if process.returncode is None:
            process.kill()
            await process.wait()
        await worker.stop()


@pytest.mark.timeout(180)
async def test_two_processes_are_one_gateway(tiny_llama_dir: Path, tmp_path: Path) -> None:
    worker = StandIn("both", "b0", Script(tokens=[7] * FOREVER, pause_s=PAUSE_S))
    async with doors(tiny_llama_dir, tmp_path, worker, max_requests=2) as it:
        first, second = NAMES
        if len(worker.submits) % 2 == 0:  # the stand-in tells requests apart by their numbers alone: they must differ
            await finish(it.start(second, "more", 1))
            it.answers += 1

        # A tenant's two places are those of both, and so are the names of requests.
        held = await it.begun(first, "held")
        assert await it.start(second, "held").code() is grpc.StatusCode.ALREADY_EXISTS
        other = await it.begun(second, "other")
        for name in NAMES:
            refused = it.start(name, "third")
            assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "2 requests of tenant 'acme' are being served already" in await refused.details()

        # Whoever is asked tells of both.
        for told in await it.figures():
            assert told["twostroke_answers_inside"] == told["twostroke_queue_places"] == 2
            assert told['twostroke_answers_total{reason="length"}'] == it.answers
            assert told['twostroke_refusals_total{reason="max_requests",tenant="acme"}'] == 2
        for name in NAMES:
            listed = await cluster_pb2_grpc.ClusterStub(it.channels[name]).ListWorkers(
                cluster_pb2.ListWorkersRequest(), metadata=it.metadata
            )
            assert [each.requests for each in listed.workers] == [2]
            info = await it.stub(name).GetServerInfo(pb.GetServerInfoRequest(), metadata=it.metadata)
            assert info.active_requests == 2

        # Abort at one ends what runs in the other, and frees its place.
        await it.stub(second).Abort(pb.AbortRequest(request_ids=["held", "unknown"]), metadata=it.metadata)
        assert (await finish(held)).finish_reason == "abort"
        assert await other.read() is not grpc.aio.EOF
        await finish(it.start(second, "again", 1))
        it.answers += 1

        # One is killed: the other's streams go on, the places of the dead one are free, another one takes its place.
        lost = await it.begun(first, "lost")
        os.kill(it.pid(first), signal.SIGKILL)
        assert await ending(lost) is grpc.StatusCode.UNAVAILABLE
        await it.told(rf"process {first}: exited")
        assert (await finish(it.start(second, "later", 1))).finish_reason == "length"
        assert (await finish(it.start(first, "reconnected", 1))).finish_reason == "length"  # to whichever is there
        it.answers += 2
        await it.told(rf"process {first}: ready", 2)
        await it.channels.pop(first).close()
        await it.find(NAMES)
        assert await other.read() is not grpc.aio.EOF
        for told in await it.figures():
            assert told["twostroke_answers_inside"] == 1
            assert told['twostroke_answers_total{reason="length"}'] == it.answers  # of the dead one too
        last = await it.begun(first, "last")
        await it.stub(second).Abort(pb.AbortRequest(request_ids=["last"]), metadata=it.metadata)
        assert (await finish(last)).finish_reason == "abort"

        # The end: all are told, what runs may finish.
        it.process.terminate()
        await it.told(r"draining for up to 10 s", 2)
        check = health_pb2_grpc.HealthStub(it.channels[second]).Check(health_pb2.HealthCheckRequest())
        assert (await check).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await it.stub(second).Abort(pb.AbortRequest(request_ids=["other"]), metadata=it.metadata)
        assert (await finish(other)).finish_reason == "abort"
        assert await asyncio.wait_for(it.process.wait(), 20) == 0
        await until(lambda: not worker.live)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_minutes_and_wrong_keys_are_counted_together(tiny_llama_dir: Path, tmp_path: Path) -> None:
    worker = StandIn("both", "b0", Script(tokens=[7] * FOREVER, pause_s=PAUSE_S))
    async with doors(tiny_llama_dir, tmp_path, worker, requests_per_minute=20) as it:
        first, second = NAMES
        codes = []
        while grpc.StatusCode.RESOURCE_EXHAUSTED not in codes:
            assert it.answers < 40  # what two alone would let in; a few leak meanwhile
            codes.append(await ending(it.start(NAMES[it.answers % 2], "", 1)))
            it.answers += 1
        assert it.answers > 20
        refused = it.start(first, "", 1)
        assert "has used up the 20 requests a minute" in await refused.details()

        wrong = (("authorization", "Bearer wrong"),)
        codes = [
            await it.stub(NAMES[number % 2]).GetModelInfo(pb.GetModelInfoRequest(), metadata=wrong).code()
            for number in range(40)
        ]
        assert codes.count(grpc.StatusCode.UNAUTHENTICATED) in range(30, 34)
        assert set(codes[34:]) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        info = it.stub(second).GetServerInfo(pb.GetServerInfoRequest(), metadata=it.metadata)
        assert await info.code() is grpc.StatusCode.OK  # it was right before


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_frozen_one_is_killed_and_a_second_signal_ends_all(tiny_llama_dir: Path, tmp_path: Path) -> None:
    worker = StandIn("both", "b0", Script(tokens=[7] * FOREVER, pause_s=PAUSE_S))
    async with doors(tiny_llama_dir, tmp_path, worker, max_requests=2) as it:
        first, second = NAMES
        stuck, other = await it.begun(first, "stuck"), await it.begun(second, "other")
        os.kill(it.pid(first), signal.SIGSTOP)
        # Asked for what the frozen one may have, the other answers all the same, of itself.
        await it.stub(second).Abort(pb.AbortRequest(request_ids=["stuck"]), metadata=it.metadata)
        assert await other.read() is not grpc.aio.EOF
        await it.told(rf"process {first}: hung")
        assert await ending(stuck) is grpc.StatusCode.UNAVAILABLE
        assert (await finish(it.start(second, "more", 1))).finish_reason == "length"
        await it.told(rf"process {first}: ready", 2)
        it.process.terminate()
        await it.told("draining for up to 10 s", 1)
        it.process.terminate()
        assert await ending(other) is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(it.process.wait(), 10)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_no_process_outlives_its_parent(tiny_llama_dir: Path, tmp_path: Path) -> None:
    worker = StandIn("both", "b0")

    async def body() -> None:
        async with doors(tiny_llama_dir, tmp_path, worker) as it:
            it.process.kill()
            await it.process.wait()
            for name in NAMES:
                await until(lambda name=name: not fds(it.pid(name)))

    with pytest.raises(AssertionError):  # its exit code
        await body()


def fds(pid: int) -> list[Path]:
    """Open files of a process; none of one that is gone, or waits to be reaped."""
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/fd").iterdir())
    return []


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_what_no_restart_mends_ends_all(tiny_llama_dir: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "twostroke.services.cli",
        "gateway",
        "--processes",
        "2",
        "--workers",
        "127.0.0.1:9",
    ]
    command += ["--listen", "127.0.0.1:0", "--model", str(tiny_llama_dir), "--api-keys", str(tmp_path / "none")]
    pipe = asyncio.subprocess.PIPE
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        environment = {**os.environ, "TMPDIR": folder}
        process = await asyncio.create_subprocess_exec(*command, stderr=pipe, env=environment)
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert not list(Path(folder).iterdir())
    assert process.returncode == 2
    assert b"api_keys" in errors
    assert b"gave up" in errors
