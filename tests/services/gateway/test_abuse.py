"""What clients may do to a gateway: floods, bytes without meaning, reading nothing. Neighbours do not notice."""

import asyncio
import gc
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from twostroke.services.grpc_setup import open_channel
from twostroke.v1 import inference_pb2 as pb

from ...raw_http2 import PREFACE, frame, literal
from ..cluster import Cluster, cluster, text_request, token_ids, until
from ..engine_fuzz import draw_message
from ..http_client import request_bytes
from ..stand_in_worker import Script, StandIn

GENERATE = "/twostroke.v1.Inference/Generate"
METHODS = (GENERATE, "/twostroke.v1.Inference/Tokenize", "/twostroke.v1.Inference/GetModel")
PHASES_S = (0.0, 0.0, 0.002, 0.01, 0.03)
Code = grpc.StatusCode
FAULTS = {Code.INTERNAL, Code.UNKNOWN, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.DATA_LOSS}
WINDOW = (1 << 31) - 1


def worker(**script: Any) -> StandIn:
    return StandIn("both", "w0", Script(**script))


@asynccontextmanager
async def beside_a_neighbour(it: Cluster) -> AsyncIterator[None]:
    """Whose streams all end well, one after the other, while the body runs."""
    done = asyncio.Event()

    async def neighbour() -> int:
        count = 0
        async with open_channel(it.address) as channel:
            stub = type(it.stub)(channel)
            while not done.is_set():
                pieces = [piece async for piece in stub.Generate(text_request(max_tokens=12))]
                assert token_ids(pieces) == list(range(10, 22))
                count += 1
        return count

    task = asyncio.create_task(neighbour())
    try:
        yield
    finally:
        done.set()
        assert await task > 0


async def checked(it: Cluster, channel: grpc.Channel, check: Callable[[], None]) -> None:
    """Runs a check that sends by `channel`, beside a neighbour; nothing is left of it."""
    async with beside_a_neighbour(it):
        await asyncio.to_thread(check)
    channel.close()
    await it.idle()


@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_floods_of_opens_and_cancels(tiny_llama_dir: Path, count: int) -> None:
    """At both doors, in every phase; memory comes back."""
    chance = random.Random(count)

    async def leave_grpc(it: Cluster) -> None:
        call = it.stub.Generate(text_request(max_tokens=30, n=chance.choice([0, 1, 3])))
        await asyncio.sleep(chance.choice(PHASES_S))
        call.cancel()

    async def leave_http(it: Cluster) -> None:
        host, _, port = it.gateway.http_address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        whole = request_bytes("/v1/completions", {"prompt": "hello", "max_tokens": 30, "stream": True})
        writer.write(whole[: chance.choice([3, 80, len(whole) - 4, len(whole)])])
        await asyncio.sleep(chance.choice(PHASES_S))
        writer.transport.abort()

    async with cluster(tiny_llama_dir, worker(pause_s=0.002), max_queue=200) as it:

        async def wave(size: int) -> None:
            await asyncio.gather(*(chance.choice([leave_grpc, leave_http])(it) for _ in range(size)))

        await wave(60)
        await it.idle()
        gc.collect()
        before = psutil.Process().memory_info().rss
        async with beside_a_neighbour(it):
            for _ in range(count // 60):
                await wave(60)
        await it.idle()
        http = it.gateway.http
        assert http is not None
        await until(lambda: http.connections == 0)
        gc.collect()
        assert psutil.Process().memory_info().rss - before < 64 << 20


@pytest.mark.parametrize("examples", [40, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_bytes_that_mean_nothing_are_refused(tiny_llama_dir: Path, examples: int) -> None:
    """Any bytes, and messages with some bytes changed, cut off or doubled, to every method."""
    good = text_request(max_tokens=3, logprobs=2, sampling=pb.Sampling(top_p=0.5)).SerializeToString()

    @st.composite
    def spoilt(draw: st.DrawFn) -> bytes:
        data = bytearray(good)
        for _ in range(draw(st.integers(0, 4))):
            at = draw(st.integers(0, len(data)))
            data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=5))
        return bytes(data) * draw(st.integers(1, 2))

    seen: Counter[grpc.StatusCode] = Counter()

    async with cluster(tiny_llama_dir, worker()) as it:
        channel = grpc.insecure_channel(it.address)

        @settings(
            max_examples=examples, deadline=None, database=None, phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(st.sampled_from(METHODS), st.binary(max_size=200) | spoilt())
        def check(method: str, data: bytes) -> None:
            code = Code.OK
            try:
                if method == GENERATE:
                    list(channel.unary_stream(method)(data, timeout=30))
                else:
                    channel.unary_unary(method)(data, timeout=30)
            except grpc.RpcError as error:
                code = error.code()
                assert code not in FAULTS, (method, data, error.details())
            seen[code] += 1

        await checked(it, channel, check)
    assert seen[Code.INVALID_ARGUMENT] > 0


@st.composite
def wild(draw: st.DrawFn) -> pb.GenerateRequest:
    """A request of any shape, or one that is nearly right."""
    request = pb.GenerateRequest()
    draw_message(draw, request)
    if draw(st.booleans()):
        request.input.text = draw(st.text(min_size=1, max_size=30))
        request.ClearField("model")
        request.ClearField("prompt_logprobs")
        request.stopping.max_tokens = draw(st.integers(0, 40))
    return request


@pytest.mark.parametrize("examples", [40, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_messages_of_any_kind_are_answered_or_refused(tiny_llama_dir: Path, examples: int) -> None:
    """Any values in any fields; of a stream that fails after its first message the last one says so."""
    seen: Counter[grpc.StatusCode] = Counter()

    async with cluster(tiny_llama_dir, worker(scores=True)) as it:
        channel = grpc.insecure_channel(it.address)
        generate = channel.unary_stream(
            GENERATE,
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )

        @settings(
            max_examples=examples, deadline=None, database=None, phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @example(pb.GenerateRequest(input=pb.Input(text="a"), stopping=pb.Stopping(max_tokens=3)), 30.0)
        @example(pb.GenerateRequest(), 30.0)  # of forty drawn ones none may be right, or none wrong
        @given(wild(), st.sampled_from([30.0, 30.0, 0.01]))
        def check(request: pb.GenerateRequest, timeout: float) -> None:
            code, pieces = Code.OK, list[pb.GenerateResponse]()
            try:
                pieces.extend(generate(request, timeout=timeout))
            except grpc.RpcError as error:
                code = error.code()
                assert code not in FAULTS - ({Code.DEADLINE_EXCEEDED} if timeout < 1 else set()), (request, error)
            else:
                assert sum(piece.HasField("finish") for piece in pieces) == (request.n or 1)
            seen[code] += 1

        await checked(it, channel, check)
    assert seen[Code.INVALID_ARGUMENT] > 0
    assert seen[Code.OK] > 0


def endless(streams: int) -> bytes:
    """A connection that grants all there is, and so many requests for all tokens that there are."""

    head = b"".join(
        literal(name, value)
        for name, value in (
            (b":method", b"POST"), (b":scheme", b"http"), (b":path", GENERATE.encode()), (b":authority", b"test"),
            (b"content-type", b"application/grpc"), (b"te", b"trailers"),
        )
    )  # fmt: skip
    body = text_request(logprobs=20, n=16).SerializeToString()
    parts = [PREFACE, frame(4, 0, 0, struct.pack(">HI", 4, WINDOW))]
    parts.append(frame(8, 0, 0, struct.pack(">I", WINDOW - 65_535)))
    for number in range(streams):
        parts.append(frame(1, 4, 2 * number + 1, head))
        parts.append(frame(0, 1, 2 * number + 1, struct.pack(">BI", 0, len(body)) + body))
    return b"".join(parts)


@pytest.mark.slow
async def test_a_reader_that_grants_everything_and_reads_nothing(tiny_llama_dir: Path) -> None:
    """HTTP/2's windows do not bound what is kept for it; the gateway does, and ends its streams."""
    streams, limit = 4, 4 << 20
    tokens = [10 + i % 200 for i in range(1500)]
    script = Script(tokens=tokens, per_step=8)
    async with cluster(
        tiny_llama_dir, StandIn("both", "w0", script), stream_buffer_bytes=limit, slow_reader_s=1.0
    ) as it:
        host, _, port = it.address.rpartition(":")
        silent = socket.socket()
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(silent, (host, int(port)))
            before = psutil.Process().memory_info().rss
            await asyncio.get_running_loop().sock_sendall(silent, endless(streams))
            await until(lambda: len(it.worker("w0").submits) == streams)
            pieces = await it.collect(text_request(max_tokens=12))
            assert token_ids(pieces) == tokens[:12]
            await it.idle()  # while it is still connected
            await until(lambda: len(it.worker("w0").cancels) == streams)  # none came to its end
            assert psutil.Process().memory_info().rss - before < (32 << 20) + 2 * streams * limit
        finally:
            silent.close()
