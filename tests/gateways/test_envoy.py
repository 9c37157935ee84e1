"""What only Envoy does: gRPC-Web for browsers, and the native API as JSON with server-sent events."""

import base64
import json
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx2
import pytest
import pytest_asyncio
from google.protobuf.json_format import MessageToDict
from google.rpc import error_details_pb2, status_pb2

from twostroke.v1 import inference_pb2 as pb

from ..e2e.harness import Stack, token_request
from ..services.certificates import Pair
from .conftest import needs
from .kinds import KINDS
from .proxy import Proxy, proxied
from .test_proxies import LONG, PROMPT, SECOND_FAILS, long_request, runs

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]
INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]
WEB = "/twostroke.v1.Inference/Generate"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def envoy(stack: Stack, certificate: Pair, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Proxy]:
    """One for all tests of this file."""
    kind = next(kind for kind in KINDS if kind.name == "envoy")
    needs(kind)
    async with proxied(kind, stack, tmp_path_factory.mktemp("envoy"), certificate) as proxy:
        yield proxy


@pytest_asyncio.fixture(loop_scope="session")
async def http(envoy: Proxy) -> AsyncIterator[httpx2.AsyncClient]:
    """HTTP/1.1 to it."""
    async with httpx2.AsyncClient(base_url=f"http://{envoy.http}", trust_env=False, timeout=60) as client:
        yield client


# gRPC-Web


def framed(message: pb.GenerateRequest) -> bytes:
    data = message.SerializeToString()
    return struct.pack(">BI", 0, len(data)) + data


def frames(body: bytes) -> Iterator[tuple[int, bytes]]:
    """(flags, content) of each."""
    while body:
        flags, length = struct.unpack(">BI", body[:5])
        yield flags, body[5 : 5 + length]
        body = body[5 + length :]


def answer(body: bytes) -> tuple[list[pb.GenerateResponse], dict[str, str]]:
    """Messages and trailers."""
    *messages, (flags, last) = frames(body)
    assert flags == 0x80
    trailers = dict(line.split(":", 1) for line in last.decode().strip().split("\r\n"))
    return [pb.GenerateResponse.FromString(content) for _, content in messages], trailers


@asynccontextmanager
async def web(
    http: httpx2.AsyncClient, request: pb.GenerateRequest, kind: str = "application/grpc-web+proto"
) -> AsyncIterator[httpx2.Response]:
    body = framed(request)
    if "text" in kind:
        body = base64.b64encode(body)
    async with http.stream("POST", WEB, content=body, headers={"content-type": kind, "accept": kind}) as response:
        assert response.status_code == 200
        yield response


async def test_grpc_web(stack: Stack, http: httpx2.AsyncClient) -> None:
    """Binary and text; a refusal with its details; an error after the first message."""
    wanted = await stack.client.generate(long_request(12))
    for kind in ("application/grpc-web+proto", "application/grpc-web-text+proto"):
        async with web(http, long_request(12), kind) as response:
            body = await response.aread()
            if "text" in kind:  # each piece is padded by itself
                body = b"".join(base64.b64decode(body[at : at + 4]) for at in range(0, len(body), 4))
        messages, trailers = answer(body)
        assert [token for message in messages for token in message.token_ids] == wanted.token_ids
        assert trailers["grpc-status"] == "0"
        assert trailers["x-request-id"]
    async with web(http, token_request(PROMPT, max_tokens=5, top_p=7.0)) as response:
        assert int(response.headers["grpc-status"]) == INVALID
        assert bad_field(response.headers["grpc-status-details-bin"]) == "sampling.top_p"
    async with web(http, token_request(PROMPT, max_tokens=5, **SECOND_FAILS)) as response:
        messages, trailers = answer(await response.aread())
    assert messages[0].token_ids == SECOND_FAILS["allowed_token_ids"]
    assert messages[-1].error.code == INVALID
    assert int(trailers["grpc-status"]) == INVALID


def bad_field(packed: str) -> str:
    """That the details of a status name."""
    status = status_pb2.Status.FromString(base64.b64decode(packed + "=="))
    bad = error_details_pb2.BadRequest()
    assert any(each.Unpack(bad) for each in status.details)
    return bad.field_violations[0].field


async def test_grpc_web_comes_as_it_is_made_and_a_page_that_is_left_ends_it(
    stack: Stack, http: httpx2.AsyncClient
) -> None:
    async with web(http, long_request()) as response:
        body, parts = b"", response.aiter_raw()
        while len(body) < 40:
            body += await anext(parts)
        assert await runs(stack)
    await stack.whole()


# JSON


def asked(**more: Any) -> dict[str, Any]:
    return {**MessageToDict(long_request(12), preserving_proto_field_name=True), **more}


async def events(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """Of a stream."""
    assert response.headers["content-type"] == "text/event-stream"
    async for line in response.aiter_lines():
        if line:
            yield json.loads(line.removeprefix("data: "))


async def test_json(stack: Stack, http: httpx2.AsyncClient) -> None:
    model = (await http.get("/twostroke/v1/model")).json()
    assert (model["model"], model["prefill_workers"], model["decode_workers"]) == ("llama", 1, 1)
    tokens = (await http.post("/twostroke/v1/tokenize", json={"input": {"text": "hello"}})).json()["token_ids"]
    assert "".join((await http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]) == "hello"
    wanted = await stack.client.generate(long_request(12))
    async with http.stream("POST", "/twostroke/v1/generate", json=asked()) as response:
        pieces = [piece async for piece in events(response)]
    assert [token for piece in pieces for token in piece["token_ids"]] == wanted.token_ids
    assert "".join(piece["text"] for piece in pieces) == wanted.text
    assert pieces[-1]["finish"]["reason"] == "FINISH_REASON_LENGTH"
    assert pieces[-1]["finish"]["usage"]["output_tokens"] == 12


async def test_json_comes_as_it_is_made_and_a_client_that_leaves_ends_it(
    stack: Stack, http: httpx2.AsyncClient
) -> None:
    body = asked(stopping={"max_tokens": LONG, "ignore_eos": True})
    async with http.stream("POST", "/twostroke/v1/generate", json=body) as response:
        count, pieces = 0, events(response)
        while count < 3:
            count += len((await anext(pieces))["token_ids"])
        assert await runs(stack)
    await stack.whole()


@pytest.mark.parametrize(
    ("path", "body", "status", "names"),
    [
        ("/twostroke/v1/generate", lambda: asked(sampling={"top_p": 7}), 400, "sampling.top_p"),
        ("/twostroke/v1/generate", lambda: asked(model="other"), 404, "MODEL_NOT_FOUND"),
        ("/twostroke/v1/generate", lambda: asked(input={}), 400, "input"),
        ("/twostroke/v1/tokenize", lambda: {"input": {"text": 3}}, 400, "text"),
        ("/twostroke/v1/nothing", lambda: {}, 404, "not_found"),
    ],
)
async def test_errors_in_json(
    http: httpx2.AsyncClient, path: str, body: Callable[[], Any], status: int, names: str
) -> None:
    """With what they name."""
    response = await http.post(path, json=body())
    assert response.status_code == status
    assert names in response.text


async def test_a_deadline_in_json(stack: Stack, http: httpx2.AsyncClient) -> None:
    body = asked(stopping={"max_tokens": LONG, "ignore_eos": True})
    response = await http.post("/twostroke/v1/generate", json=body, headers={"grpc-timeout": "1u"})
    assert response.status_code == 504
    await stack.whole()


async def test_an_error_after_the_first_event(stack: Stack, http: httpx2.AsyncClient) -> None:
    """Is the last event: the status itself has no place in a response that has begun."""
    pieces = []
    async with http.stream("POST", "/twostroke/v1/generate", json=asked(sampling=SECOND_FAILS)) as response:
        try:
            async for piece in events(response):
                pieces.append(piece)
        except httpx2.HTTPError:
            pass
    assert pieces[0]["token_ids"] == SECOND_FAILS["allowed_token_ids"]
    assert (pieces[-1]["error"]["code"], pieces[-1]["error"]["reason"]) == (INVALID, "INVALID_REQUEST")
    await stack.whole()


async def test_pages_of_other_sites_may_not_call(http: httpx2.AsyncClient) -> None:
    """As the configuration stands: nobody's origin is allowed."""
    asking = {"origin": "https://other.example", "access-control-request-method": "POST"}
    response = await http.options(WEB, headers=asking)
    assert "access-control-allow-origin" not in response.headers
