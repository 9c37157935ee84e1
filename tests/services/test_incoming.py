"""Requests that do not arrive: a part of a message, or none, is waited for no longer than so long."""

import asyncio
import gzip
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil

from twostroke.oip import grpc_service_pb2_grpc as oip_rpc
from twostroke.services.gateway.doors import INFERENCE, OPEN_INFERENCE
from twostroke.smg import vllm_engine_pb2_grpc as smg_rpc

from ..raw_http2 import Call, Connection, connected
from .cluster import Cluster, cluster, text_request, token_ids, until
from .oip_client import infer
from .stand_in_worker import Script, StandIn

Code = grpc.StatusCode
ONE = {
    f"/{INFERENCE}/Generate",
    f"/{INFERENCE}/Tokenize",
    f"/{INFERENCE}/GetModel",
    f"/{OPEN_INFERENCE}/ModelInfer",
    f"/{OPEN_INFERENCE}/ServerLive",
    "/vllm.grpc.engine.VllmEngine/Generate",
    "/vllm.grpc.engine.VllmEngine/Abort",
    "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
    "/vllm.grpc.engine.VllmEngine/GetTokenizer",
    "/twostroke.v1.Cluster/ListWorkers",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
}
MANY = {f"/{OPEN_INFERENCE}/ModelStreamInfer", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"}
PART = struct.pack(">BI", 0, 100) + b"x" * 30
PARTS = (b"", PART[:3], PART[:5], PART)


@asynccontextmanager
async def door(model: Path, **settings: Any) -> AsyncIterator[tuple[Cluster, Connection]]:
    """A gateway and a connection to it by hand."""
    async with (
        cluster(model, StandIn("both", "w0", Script(pause_s=0.002)), **settings) as it,
        connected(it.address) as connection,
    ):
        yield it, connection


async def test_what_does_not_arrive_is_given_up_and_its_place_is_free(tiny_llama_dir: Path) -> None:
    """At every method, whatever part is there; neighbours go on."""
    async with door(tiny_llama_dir, request_s=0.4, stream_idle_s=0.4, max_streams=60) as (it, connection):
        tasks = len(asyncio.all_tasks())
        for _ in range(2):  # the second round has places only if the first one's are free
            calls = {(path, part): connection.begin(path, part) for path in ONE | MANY for part in PARTS}
            assert token_ids(await it.collect(text_request(max_tokens=5))) == list(range(10, 15))
            for (path, part), call in calls.items():
                await connection.end_of(call)
                assert call.status == Code.DEADLINE_EXCEEDED.value[0], (path, part, call)
                told = "the request did not arrive within" if path in ONE else "no request came for"
                assert call.trailers.get("grpc-message", call.headers.get("grpc-message", "")).startswith(told)
            await until(lambda: len(asyncio.all_tasks()) <= tasks)
        await it.idle()


def test_all_methods_are_among_them() -> None:
    for stub, service in ((oip_rpc.GRPCInferenceServiceStub, OPEN_INFERENCE), (smg_rpc.VllmEngineStub, "vllm.grpc")):
        assert any(path.startswith(f"/{service}") for path in ONE), stub


async def test_what_arrives_in_pieces_in_time_is_served(tiny_llama_dir: Path) -> None:
    async with door(tiny_llama_dir) as (it, connection):
        data = text_request(max_tokens=3).SerializeToString()
        whole = struct.pack(">BI", 0, len(data)) + data
        call = connection.begin(f"/{INFERENCE}/Generate", whole[:2])
        for at in range(2, len(whole)):
            await asyncio.sleep(0.002)
            connection.more(call, whole[at : at + 1], ends=at == len(whole) - 1)
        await connection.end_of(call)
        assert call.status == 0
        await it.idle()


async def test_a_call_without_its_request(tiny_llama_dir: Path) -> None:
    async with door(tiny_llama_dir) as (_, connection):
        for path in ONE:
            call = connection.begin(path, b"", ends=True)
            await connection.end_of(call)
            assert call.status == Code.INVALID_ARGUMENT.value[0], path


def stream(connection: Connection, **asked: Any) -> Call:
    """A call of many requests, with one of them."""
    data = infer(stream=True, id="a", **asked).SerializeToString()
    return connection.begin(f"/{OPEN_INFERENCE}/ModelStreamInfer", struct.pack(">BI", 0, len(data)) + data)


async def test_a_stream_ends_when_nothing_is_under_way_and_nothing_comes(tiny_llama_dir: Path) -> None:
    """While an answer is, there is no limit; a part of a further request is none."""
    async with door(tiny_llama_dir, stream_idle_s=0.3, request_s=0.2) as (it, connection):
        it.worker("w0").script.pause_s = 0.05
        call = stream(connection, sampling={"max_tokens": 20})
        connection.more(call, PART)
        await until(lambda: b"triton_final_response\x12\x02\x08\x01" in call.body)
        assert not call.ended
        await connection.end_of(call)
        assert call.status == Code.DEADLINE_EXCEEDED.value[0]
        assert b"no request came for 0.3 s" in call.body  # in-band, too
        await it.idle()


async def test_what_is_packed_small_may_not_be_large(tiny_llama_dir: Path) -> None:
    """A request of a GiB, compressed to one of a MiB, is not unpacked."""
    bomb = gzip.compress(gzip.compress(bytes(1 << 30), 1), 9)
    packed = gzip.compress(bytes(64 << 20), 9)
    async with door(tiny_llama_dir) as (it, connection):
        before = psutil.Process().memory_info().rss
        for body in (bomb, packed):
            assert len(body) < 1 << 18
            data = struct.pack(">BI", 1, len(body)) + body
            call = connection.begin(f"/{INFERENCE}/Generate", b"", grpc_encoding="gzip")
            for at in range(0, len(data), 1 << 14):
                connection.more(call, data[at : at + (1 << 14)], ends=at + (1 << 14) >= len(data))
                await asyncio.sleep(0.01)
            await connection.end_of(call)
            assert call.status in (Code.RESOURCE_EXHAUSTED.value[0], Code.INVALID_ARGUMENT.value[0])
        assert psutil.Process().memory_info().rss - before < 32 << 20
        await it.idle()
