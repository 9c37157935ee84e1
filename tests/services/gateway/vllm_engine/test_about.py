"""What the engine door tells of the model, the gateway and the workers; the tokenizer's files; what it does not do."""

import asyncio
import hashlib
import io
import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from twostroke import __version__
from twostroke.errors import WrongState
from twostroke.services.gateway.vllm_engine.about import ModelFacts, read_facts
from twostroke.services.gateway.vllm_engine.servicer import SERVICE
from twostroke.services.gateway.vllm_engine.tokenizer_files import CHUNK_BYTES, NAMES, TokenizerFiles, pack, split
from twostroke.services.security.api_keys import new_key
from twostroke.smg import common_pb2
from twostroke.smg import vllm_engine_pb2 as pb

from ...cluster import refusal, until
from ...stand_in_worker import StandIn
from .engine_client import decode, engine, prefill, request

Code = grpc.StatusCode


async def test_the_model(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill(), decode(), max_input=100) as it:
        info = await it.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.model_path, info.tokenizer_path) == (str(tiny_llama_dir), str(tiny_llama_dir))
        assert (info.served_model_name, info.model_type) == ("llama", "llama")
        assert (info.is_generation, info.supports_vision) == (True, False)
        assert (info.max_context_length, info.max_req_input_len) == (2048, 100)
        assert (list(info.eos_token_ids), info.bos_token_id) == ([0, 2], 1)
        config = json.loads((tiny_llama_dir / "config.json").read_text())
        assert info.vocab_size == config["vocab_size"]
        assert list(info.architectures) == config["architectures"]
        assert info.default_sampling_params_json == ""


def test_odd_files_tell_less(tmp_path: Path) -> None:
    assert read_facts(tmp_path) == ModelFacts(str(tmp_path))
    for odd in (
        "[]",
        "{",
        json.dumps({"architectures": "x", "bos_token_id": [1], "pad_token_id": -1, "model_type": 3}),
    ):
        (tmp_path / "config.json").write_text(odd)
        assert read_facts(tmp_path) == ModelFacts(str(tmp_path))


async def test_the_gateway(tiny_llama_dir: Path) -> None:
    both = StandIn("both", "b0", page_size=32)
    async with engine(tiny_llama_dir, both) as it:
        info = await it.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.active_requests, info.is_paused, info.last_receive_timestamp) == (0, False, 0)
        assert (info.server_type, info.data_parallel_size) == ("vllm-grpc", 1)
        assert (info.block_size, info.kv_cache_dtype, info.max_num_seqs) == (32, "float32", 64)
        assert info.constrained_decoding_start == "first_token"
        both.script.mute_after = 1
        call = it.stub.Generate(request("a"))
        await call.read()
        info = await it.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.active_requests == 1
        assert info.last_receive_timestamp > 1e9
        assert 0 < info.uptime_seconds < 1000
        assert (await it.stub.HealthCheck(pb.HealthCheckRequest())).healthy
        call.cancel()


async def test_the_workers_loads_are_summed_up(tiny_llama_dir: Path) -> None:
    p0, d0, d1 = StandIn("prefill", "p0", pages=500), StandIn("decode", "d0"), StandIn("decode", "d1")
    async with engine(tiny_llama_dir, p0, d0, d1) as it:
        p0.status(running=5, waiting=9, waiting_tokens=1000, free_pages=1)
        d0.status(running=3, waiting=1, free_pages=600, decode_step_us=10_000)
        d1.status(running=2, waiting=0, free_pages=900, waiting_tokens=7)

        async def load() -> Any:
            response = await it.stub.GetLoads(pb.GetLoadsRequest(dp_rank=0, include=["core"]))
            assert (response.version, response.dp_rank_count, len(response.loads)) == (__version__, 1, 1)
            assert response.timestamp.startswith("20")
            return response.loads[0]

        async with asyncio.timeout(5):
            while (told := await load()).num_total_reqs != 6 or told.num_waiting_uncached_tokens != 1007:
                for worker, values in ((p0, {"waiting_tokens": 1000}), (d1, {"waiting_tokens": 7, "running": 2})):
                    worker.status(**{"free_pages": 900, **values})  # theirs of each 0.3 s come between
                d0.status(running=3, waiting=1, free_pages=600, decode_step_us=10_000)
                await asyncio.sleep(0.01)
        assert (told.num_running_reqs, told.num_waiting_reqs) == (5, 1)
        assert (told.max_total_num_tokens, told.num_used_tokens) == (2000 * 16, 500 * 16)
        assert told.token_usage == told.utilization == 0.25
        assert told.gen_throughput == pytest.approx(300)
        assert (told.max_running_requests, told.cache_hit_rate) == (128, 0)
        await it.all(request(ids=[5] * 10))
        assert (await load()).cache_hit_rate == 0.5  # 5 of 10, as the script says
        other = await it.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))
        assert (other.dp_rank_count, len(other.loads)) == (1, 0)


async def test_the_tokenizer_s_files(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill(), decode()) as it:
        chunks = [chunk async for chunk in it.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        archive = b"".join(chunk.data for chunk in chunks)
        assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(archive).hexdigest()]
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            assert files.read("tokenizer.json") == (tiny_llama_dir / "tokenizer.json").read_bytes()
            assert set(files.namelist()) <= set(NAMES)
            assert not any(name.endswith(".safetensors") for name in files.namelist())
        assert pack(tiny_llama_dir) == archive  # the same each time


def test_pieces_are_small() -> None:
    archive = bytes(range(256)) * 1000
    chunks = list(split(archive))
    assert max(len(chunk.data) for chunk in chunks) == CHUNK_BYTES
    assert b"".join(chunk.data for chunk in chunks) == archive


async def test_a_folder_without_files(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        files = TokenizerFiles(tmp_path, threads)
        for _ in range(2):
            with pytest.raises(WrongState):
                await files.chunks()
        (tmp_path / "tokenizer.json").write_text("{}")
        assert len(list(await files.chunks())) == 1
        (tmp_path / "tokenizer.json").unlink()
        assert len(list(await files.chunks())) == 1  # it was packed


async def test_what_it_does_not_do_is_unimplemented(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill(), decode()) as it:
        for call in (
            it.stub.Embed(pb.EmbedRequest()),
            it.stub.FlushCache(common_pb2.FlushCacheRequest()),
            it.stub.StartProfile(common_pb2.StartProfileRequest()),
            it.stub.StopProfile(common_pb2.StopProfileRequest()),
        ):
            error = await refusal(call)
            assert error.code() is Code.UNIMPLEMENTED
            assert len(error.details() or "") > 20


async def services(it: Any) -> set[str]:
    """That reflection tells of."""

    async def ask() -> Any:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    stub: Any = reflection_pb2_grpc.ServerReflectionStub(it.it.channel)
    [answer] = [each async for each in stub.ServerReflectionInfo(ask())]
    return {service.name for service in answer.list_services_response.service}


async def test_reflection_health_and_the_switch(tiny_llama_dir: Path) -> None:
    for on in (True, False):
        async with engine(tiny_llama_dir, prefill(), decode(), vllm_engine=on) as it:
            assert (SERVICE in await services(it)) is on
            health: Any = health_pb2_grpc.HealthStub(it.it.channel)
            asked = health_pb2.HealthCheckRequest(service=SERVICE)
            if on:
                await until(lambda it=it: it.it.gateway.fleet.can_decode)
                assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
            else:
                assert (await refusal(health.Check(asked))).code() is Code.NOT_FOUND
                assert (await refusal(it.all(request()))).code() is Code.UNIMPLEMENTED


async def test_every_call_takes_a_key(tiny_llama_dir: Path, tmp_path: Path) -> None:
    key, kept = new_key("acme")
    keys = tmp_path / "keys.jsonl"
    keys.write_text(kept.line() + "\n")
    who = (("authorization", f"Bearer {key}"),)
    async with engine(tiny_llama_dir, prefill(), decode(), api_keys=keys) as it:
        for metadata, code in (((), Code.UNAUTHENTICATED), (who, Code.OK)):
            for method, message in (
                (it.stub.GetModelInfo, pb.GetModelInfoRequest()),
                (it.stub.GetLoads, pb.GetLoadsRequest()),
                (it.stub.HealthCheck, pb.HealthCheckRequest()),
                (it.stub.Abort, pb.AbortRequest()),
            ):
                call = method(message, metadata=metadata)
                assert await call.code() is code
            streams = (
                it.stub.Generate(request(max_tokens=2), metadata=metadata),
                it.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), metadata=metadata),
            )
            for call in streams:
                if code is Code.OK:
                    assert [each async for each in call]
                else:
                    assert await call.code() is code
        submitted = it.it.worker("p0").submits[0]
        assert len(submitted.cache_salt) == 32  # the tenant's
