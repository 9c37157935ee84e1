"""Bad input gets a precise status each, and a neighbour in the batch does not notice."""

import asyncio
import math
from collections.abc import Callable

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from twostroke.v1 import inference_pb2 as pb

from .harness import Client, Launch, token_request

CONTEXT = 2048
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def _with(change: Callable[[pb.GenerateRequest], object]) -> pb.GenerateRequest:
    request = token_request([5, 6, 7], max_tokens=4)
    change(request)
    return request


def _text(text: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(input=pb.Input(text=text), stopping=pb.Stopping(max_tokens=4))


CASES: dict[str, tuple[pb.GenerateRequest, grpc.StatusCode, str]] = {
    "no input": (pb.GenerateRequest(), INVALID, "input"),
    "empty text": (_text(""), INVALID, "input.text"),
    "empty ids": (_with(lambda r: r.input.token_ids.ClearField("ids")), INVALID, "input.token_ids"),
    "empty chat": (pb.GenerateRequest(input=pb.Input(chat=pb.Chat())), INVALID, "input.chat"),
    "over the model's length": (_with(lambda r: r.input.token_ids.ids.extend([5] * CONTEXT)), INVALID, "input"),
    "unknown model": (_with(lambda r: setattr(r, "model", "gpt-5")), grpc.StatusCode.NOT_FOUND, "model"),
    "token id out of range": (_with(lambda r: r.input.token_ids.ids.append(1 << 30)), INVALID, "input.token_ids"),
    "NaN temperature": (_with(lambda r: setattr(r.sampling, "temperature", math.nan)), INVALID, "sampling.temperature"),
    "negative temperature": (_with(lambda r: setattr(r.sampling, "temperature", -1)), INVALID, "sampling.temperature"),
    "top_p of 0": (_with(lambda r: setattr(r.sampling, "top_p", 0)), INVALID, "sampling.top_p"),
    "no tokens wanted": (_with(lambda r: setattr(r.stopping, "max_tokens", 0)), INVALID, "stopping.max_tokens"),
    "contradictory limits": (_with(lambda r: setattr(r.stopping, "max_tokens", CONTEXT)), INVALID, "stopping.max"),
    "1,000 stop strings": (_with(lambda r: r.stopping.strings.extend("a" * 1000)), INVALID, "stopping.strings"),
    "empty stop string": (_with(lambda r: r.stopping.strings.append("")), INVALID, "stopping.strings"),
    "too many logprobs": (_with(lambda r: setattr(r, "logprobs", 21)), INVALID, "logprobs"),
    "4 MB prompt": (_text("word " * 800_000), INVALID, "input.text"),
    "10 MB prompt": (_text("word " * 2_000_000), grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
}  # fmt: skip


async def _refusal(client: Client, request: pb.GenerateRequest, **options: float) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generate(request, **options)
    return caught.value


def _field(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)
    assert status is not None
    for detail in status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            return bad.field_violations[0].field
    return ""


async def test_statuses_and_an_undisturbed_neighbour(launch: Launch, tiny_dir) -> None:
    """Each case of bad input beside a long stream, whose tokens equal those of a quiet run."""
    async with launch("--model", str(tiny_dir), "--kv-memory", "32MiB") as stack:
        quiet = await stack.client.tokens(range(3, 40), max_tokens=1500)
        neighbour = asyncio.create_task(stack.client.tokens(range(3, 40), max_tokens=1500))
        for name, (request, code, field) in CASES.items():
            error = await _refusal(stack.client, request)
            assert error.code() is code, (name, error.details())
            if code is INVALID:
                assert _field(error).startswith(field), (name, error.details(), _field(error))
            assert error.details(), name
        await _malformed_utf8(stack.client)
        error = await _refusal(stack.client, token_request([5], max_tokens=4), timeout=1e-6)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await neighbour).token_ids == quiet.token_ids
        error = await _refusal(stack.client, token_request([5], max_tokens=2000), timeout=0.3)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await stack.whole()


async def _malformed_utf8(client: Client) -> None:
    call = client.channel.unary_stream("/twostroke.v1.Inference/Generate")  # raw bytes in, raw bytes out
    message = bytes([0x12, 4, 0x0A, 2, 0xC3, 0x28])  # input { text: "\xc3(" }
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call(message, timeout=10):
            pass
    assert caught.value.code() in (INVALID, grpc.StatusCode.INTERNAL)


async def test_a_client_that_reads_nothing(launch: Launch, tiny_dir) -> None:
    """It holds no page for longer than the answer takes, or loses its stream; neighbours are served meanwhile."""
    flags = ("--kv-memory", "32MiB", "--stream-buffer-bytes", "65536", "--slow-reader-s", "1")
    async with launch("--model", str(tiny_dir), *flags) as stack:
        silent = [
            stack.client.call(token_request([5, 6, i], max_tokens=1900, temperature=1.0, seed=i)) for i in range(3, 11)
        ]
        for call in silent:
            await call.initial_metadata()
        for i in range(4):
            assert len((await stack.client.tokens([7, 8, i + 3], max_tokens=50)).token_ids) == 50
        await stack.whole()
        for call in silent:
            call.cancel()
