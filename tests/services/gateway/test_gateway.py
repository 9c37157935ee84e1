"""The gateway process: start, health, drain, stop; what it does not import."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twostroke.errors import ConfigError
from twostroke.services.gateway.gateway import Gateway, load_model
from twostroke.services.grpc_setup import open_channel
from twostroke.services.settings import GatewaySettings
from twostroke.v1 import inference_pb2_grpc

from ..cluster import cluster, failure, refusal, retry_s, text_request, token_ids, until
from ..stand_in_worker import Script, StandIn

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(channel: grpc.aio.Channel, service: str = "twostroke.v1.Inference") -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def test_serving_while_a_worker_can_decode(tiny_llama_dir: Path) -> None:
    prefill, decode = StandIn("prefill", "p0"), StandIn("decode", "d0")
    decode.ready = False
    async with cluster(tiny_llama_dir, prefill, decode, connected=1) as it:
        assert await health(it.channel) == NOT_SERVING
        decode.ready = True
        await it.ready(2)
        await _until_health(it.channel, SERVING)
        assert await health(it.channel, "") == SERVING
        decode.draining = True
        decode.status(draining=True)
        await _until_health(it.channel, NOT_SERVING)
        decode.draining = False
        decode.status()
        await _until_health(it.channel, SERVING)
        await decode.stop()
        await _until_health(it.channel, NOT_SERVING)


async def _until_health(channel: grpc.aio.Channel, wanted: int) -> None:
    async with asyncio.timeout(10):
        while await health(channel) != wanted:
            await asyncio.sleep(0.01)


async def test_draining_lets_streams_end_and_admits_nothing(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, StandIn("both", "w0", Script(pause_s=0.01))) as it:
        running = asyncio.create_task(it.collect(text_request()))
        await until(lambda: it.gateway.admission.inside == 1)
        draining = asyncio.create_task(it.gateway.drain(30, asyncio.Event()))
        await asyncio.sleep(0)
        error = await refusal(it.collect(text_request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert retry_s(error) > 0
        assert await health(it.channel) == NOT_SERVING
        assert len(token_ids(await running)) == 31
        await draining


@pytest.mark.parametrize("hurried", [False, True])
async def test_what_is_not_done_in_time_is_cut_with_a_status(tiny_llama_dir: Path, hurried: bool) -> None:
    async with cluster(tiny_llama_dir, StandIn("both", "w0", Script(mute_after=2))) as it:
        running = it.stub.Generate(text_request())
        await running.read()
        hurry = asyncio.Event()
        if hurried:
            asyncio.get_running_loop().call_later(0.05, hurry.set)
        await it.gateway.drain(600 if hurried else 0.05, hurry)

        async def rest() -> None:
            while await running.read() is not grpc.aio.EOF:
                pass

        error = await refusal(rest())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in (error.details() or "")
        await it.idle()


async def test_an_address_in_use_is_a_configuration_error(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir) as it:
        settings = GatewaySettings(model=str(tiny_llama_dir), listen=it.address)
        second = Gateway(settings, load_model(settings))
        with pytest.raises(ConfigError) as caught:
            await second.start()
        assert caught.value.field == "listen"
        await second.stop()


def test_limits_of_the_served_model(tiny_llama_dir: Path) -> None:
    model = load_model(GatewaySettings(model=str(tiny_llama_dir)))
    assert (model.name, model.context_length, model.max_input, model.max_output) == ("llama", 2048, 2047, 2047)
    assert 1 < model.longest_token < 100
    small = load_model(GatewaySettings(model=str(tiny_llama_dir), max_input=64, max_output=1 << 20))
    assert (small.max_input, small.max_output) == (64, 2047)
    with pytest.raises(ConfigError):
        load_model(GatewaySettings(model=str(tiny_llama_dir / "nowhere")))


def test_the_gateway_does_not_import_torch() -> None:
    code = "import sys, twostroke.services.gateway.gateway; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The process, by its signals

SERVE = """
import asyncio, sys, uvloop
from twostroke.services import logs
from twostroke.services.gateway.gateway import serve
from twostroke.services.settings import GatewaySettings
logs.setup("info", "gateway-0")
model, worker = sys.argv[1:]
uvloop.run(serve(GatewaySettings(model=model, listen="127.0.0.1:0", workers=[worker], drain_s=20)))
"""


@asynccontextmanager
async def process(model: Path, worker: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A gateway process and its address, ready to serve."""
    it = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVE, str(model), worker, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert it.stderr is not None
        address, lines = "", []
        async with asyncio.timeout(60):
            while not any("can be served" in line for line in lines):
                lines.append((await it.stderr.readline()).decode())
                if match := re.search(r"serving llama on (\S+)", lines[-1]):
                    address = match[1]
                assert lines[-1], lines
        yield it, address
    finally:
        if it.returncode is None:
            it.kill()
        await it.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains(tiny_llama_dir: Path, number: signal.Signals) -> None:
    worker = StandIn("both", "w0", Script(pause_s=0.02))
    async with process(tiny_llama_dir, await worker.start()) as (it, address), open_channel(address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(text_request())
        pieces = [await call.read()]
        it.send_signal(number)
        while (piece := await call.read()) is not grpc.aio.EOF:
            pieces.append(piece)
        assert len(token_ids(pieces)) == 31
        assert await it.wait() == 0
    await worker.stop()


async def test_the_second_signal_ends(tiny_llama_dir: Path) -> None:
    worker = StandIn("both", "w0", Script(mute_after=1))
    async with process(tiny_llama_dir, await worker.start()) as (it, address), open_channel(address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(text_request())
        await call.read()
        it.send_signal(signal.SIGTERM)
        await _until_health(channel, NOT_SERVING)
        it.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await it.wait() == 0
        assert (await failure(call)).code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: not worker.live)
    await worker.stop()


async def test_a_killed_gateway_leaves_nothing_at_the_worker(tiny_llama_dir: Path) -> None:
    worker = StandIn("both", "w0", Script(mute_after=1))
    async with process(tiny_llama_dir, await worker.start()) as (it, address), open_channel(address) as channel:
        await inference_pb2_grpc.InferenceStub(channel).Generate(text_request()).read()
        assert worker.live
        assert it.pid is not None
        os.kill(it.pid, signal.SIGKILL)
        await until(lambda: not worker.live)
    await worker.stop()


def test_a_gateway_needs_a_tokenizer_and_no_weights(tiny_llama_dir: Path, tmp_path: Path) -> None:
    for file in tiny_llama_dir.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert load_model(GatewaySettings(model=str(tmp_path))).context_length == 2048
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"lacks tokenizer\.json: a gateway needs one"):
        load_model(GatewaySettings(model=str(tmp_path)))
