"""What clients see through each proxy is what they see without one."""

import asyncio
import signal
import ssl
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import httpx2
import openai
import pytest
from google.rpc import error_details_pb2

from twostroke.v1 import inference_pb2 as pb

from ..e2e.harness import Answer, Client, Stack, token_request
from ..raw_http2 import connected
from ..services.certificates import Authority
from ..services.cluster import detail, field_of, refusal, retry_s
from .conftest import MOST, ProxyOf
from .proxy import Proxy

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]
Code = grpc.StatusCode
PATH = "/twostroke.v1.Inference/Generate"
LONG = 16_000  # tokens: minutes
PROMPT = list(range(40, 60))
CHAT: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": "hello"}]}
ENDLESS: dict[str, Any] = {**CHAT, "stream": True, "max_completion_tokens": LONG, "extra_body": {"ignore_eos": True}}
SECOND_FAILS: dict[str, Any] = {"allowed_token_ids": [71], "bad_words": ["ee"]}  # token 0 is e, and then nothing may be


def long_request(tokens: int = LONG) -> pb.GenerateRequest:
    return token_request(PROMPT, max_tokens=tokens)


def sdk(base: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{base}/v1", api_key="none", max_retries=0, timeout=60)


async def runs(stack: Stack) -> bool:
    """Whether the decode worker has a request, by its own word."""
    return (await stack.status("decode-0")).running > 0


async def first_of(messages: AsyncIterator[pb.GenerateResponse]) -> pb.GenerateResponse:
    """The first with tokens."""
    while not (message := await anext(messages)).token_ids:
        assert not message.HasField("finish")
    return message


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
async def test_messages_come_as_they_are_made_and_a_cancel_reaches_the_engine(
    stack: Stack, proxy: Proxy, authority: Authority, secure: bool
) -> None:
    """The worker goes on while the client has the first messages already; nothing but the cancel ends it."""
    async with proxy.client(tls=authority.path.read_bytes() if secure else None) as client:
        call = client.call(long_request())
        messages, tokens = aiter(call), 0
        for _ in range(5):
            message = await first_of(messages)
            assert message.first_index == tokens
            tokens += len(message.token_ids)
        assert await runs(stack)
        assert tokens < LONG
        call.cancel()
        await stack.whole()


async def test_whole_answers(stack: Stack, proxy: Proxy, authority: Authority) -> None:
    wanted = await stack.client.generate(long_request(60))
    for tls in (None, authority.path.read_bytes()):
        async with proxy.client(tls=tls) as client:
            call = client.call(long_request(60), metadata=(("x-tenant-note", "x" * 4000),))
            answer = Answer()
            async for message in call:
                answer.take(message)
            assert (answer.token_ids, answer.text) == (wanted.token_ids, wanted.text)
            assert len(answer.messages) > 30  # a token a message, or nearly
            assert dict(await call.trailing_metadata())["x-request-id"]


async def test_details_of_a_refusal(proxy: Proxy, authority: Authority) -> None:
    for tls in (None, authority.path.read_bytes()):
        async with proxy.client(tls=tls) as client:
            error = await refusal(client.tokens(PROMPT, max_tokens=5, top_p=7.0))
            assert (error.code(), field_of(error)) == (Code.INVALID_ARGUMENT, "sampling.top_p")
            assert "top_p" in (error.details() or "")
            error = await refusal(client.generate(pb.GenerateRequest(model="other", input=pb.Input(text="x"))))
            assert error.code() is Code.NOT_FOUND
            assert detail(error, error_details_pb2.ErrorInfo).reason == "MODEL_NOT_FOUND"


async def test_an_error_after_the_first_message(proxy: Proxy) -> None:
    async with proxy.client() as client:
        call = client.call(token_request(PROMPT, max_tokens=9, **SECOND_FAILS))
        messages = aiter(call)
        assert list((await first_of(messages)).token_ids) == SECOND_FAILS["allowed_token_ids"]
        last = await anext(messages)
        assert (last.error.code, last.error.reason) == (Code.INVALID_ARGUMENT.value[0], "INVALID_REQUEST")
        error = await refusal(anext(messages))
        assert (error.code(), error.details()) == (Code.INVALID_ARGUMENT, last.error.message)
        assert detail(error, error_details_pb2.ErrorInfo).reason == "INVALID_REQUEST"
    async with sdk(proxy.http) as client_:
        stream = await client_.chat.completions.create(**CHAT, stream=True, extra_body=SECOND_FAILS)
        with pytest.raises(openai.APIError, match="leave no token"):
            async for _ in stream:
                pass


async def test_a_deadline_that_only_the_gateway_keeps(stack: Stack, proxy: Proxy) -> None:
    """The client waits on; what ends the stream is the deadline that it told."""
    async with connected(proxy.grpc) as connection:
        call = connection.call(PATH, long_request(), grpc_timeout="1500m")
        await connection.end_of(call)
        assert (call.status, call.reset) == (Code.DEADLINE_EXCEEDED.value[0], None)
        assert call.body
        passed = connection.call(PATH, long_request(), grpc_timeout="1u")
        await connection.end_of(passed)
        refused = Code.RESOURCE_EXHAUSTED  # where the gateway expects it to wait for longer than that
        assert passed.status in (Code.DEADLINE_EXCEEDED.value[0], refused.value[0])
    await stack.whole()
    async with httpx2.AsyncClient(base_url=f"http://{proxy.http}", trust_env=False) as http:
        body = {**CHAT, "max_completion_tokens": LONG, "ignore_eos": True}
        response = await http.post("/v1/chat/completions", json=body, headers={"x-request-timeout": "0.5"}, timeout=60)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    await stack.whole()


async def test_300_streams_at_once_and_one_more(stack: Stack, proxy: Proxy) -> None:
    """Each has its first message before any has ended: no stream waits for another one's end."""
    async with proxy.client() as one, proxy.client() as other:
        share = MOST if proxy.kind.streams >= MOST else MOST // 2
        calls = [(one if number < share else other).call(long_request()) for number in range(MOST)]
        try:
            firsts = await asyncio.gather(*(first_of(aiter(call)) for call in calls))
            assert [message.first_index for message in firsts] == [0] * MOST
            assert not any(call.done() for call in calls)
            async with proxy.client() as late:
                error = await refusal(late.tokens(PROMPT, max_tokens=2))
            assert error.code() is Code.RESOURCE_EXHAUSTED
            assert retry_s(error) > 0
            async with httpx2.AsyncClient(base_url=f"http://{proxy.http}", trust_env=False, timeout=30) as http:
                response = await http.post("/v1/chat/completions", json=CHAT)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert int(response.headers["retry-after"]) >= 1
        finally:
            for call in calls:
                call.cancel()
    await stack.whole()


async def test_too_much_metadata_is_refused_and_costs_nobody_else_anything(stack: Stack, proxy: Proxy) -> None:
    async with proxy.client() as neighbour, proxy.client() as client:
        call = neighbour.call(long_request())
        messages = aiter(call)
        await first_of(messages)
        for size in (20_000, 200_000):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in client.call(long_request(5), metadata=(("x-large", "x" * size),), timeout=20):
                    pass
            assert caught.value.code() is not Code.DEADLINE_EXCEEDED
        async with proxy.client() as fresh:  # nginx has closed the other's connection
            assert len((await fresh.tokens(PROMPT, max_tokens=3)).token_ids) == 3
        async with httpx2.AsyncClient(base_url=f"http://{proxy.http}", trust_env=False, timeout=30) as http:
            response = await http.get("/v1/models", headers={"x-large": "x" * 40_000})
            assert response.status_code in (400, 431, 494)
        await first_of(messages)
        call.cancel()
    await stack.whole()


async def test_a_request_that_is_too_large_is_refused(stack: Stack, proxy: Proxy) -> None:
    """The gateway answers while the client still sends; HAProxy makes a cancel of it, Envoy breaks the connection."""
    text = "x" * (17 << 20)
    large = [("grpc.max_send_message_length", 32 << 20)]
    async with grpc.aio.insecure_channel(proxy.grpc, options=large) as channel:
        error = await refusal(Client(channel).generate(pb.GenerateRequest(input=pb.Input(text=text)), timeout=60))
        assert error.code() is (Code.CANCELLED if proxy.kind.name == "haproxy" else Code.RESOURCE_EXHAUSTED)
    async with httpx2.AsyncClient(base_url=f"http://{proxy.http}", trust_env=False, timeout=60) as http:
        try:
            response = await http.post("/v1/completions", json={"prompt": text})
        except httpx2.HTTPError:
            assert proxy.kind.name == "envoy"
        else:
            assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        assert (await http.get("/health")).status_code == 200
    await stack.whole()


async def test_the_openai_sdk(stack: Stack, proxy: Proxy) -> None:
    """Streams come as they are made; leaving one ends it at the engine; whole answers and errors are the same."""
    async with sdk(proxy.http) as client:
        stream = await client.chat.completions.create(**ENDLESS)
        chunks = aiter(stream)
        for _ in range(3):
            await anext(chunks)
        assert await runs(stack)
        await anext(chunks)
        await stream.close()
        await stack.whole()
        asked = {**CHAT, "temperature": 0, "max_completion_tokens": 30}
        answers = []
        async with sdk(stack.http.removeprefix("http://")) as direct:
            for each in (client, direct):
                answer = await each.chat.completions.create(**asked)
                answers.append((answer.choices[0].message.content, answer.usage and answer.usage.total_tokens))
        assert answers[0] == answers[1]
        assert answers[0][0]


async def test_statuses_of_http_go_through_unchanged(stack: Stack, proxy: Proxy, authority: Authority) -> None:
    requests = [
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/other", None),
        ("GET", "/nothing/here", None),
        ("DELETE", "/health", None),
        ("POST", "/v1/chat/completions", {**CHAT, "top_p": 7}),
        ("POST", "/v1/chat/completions", {**CHAT, "model": "other"}),
        ("POST", "/v1/chat/completions", {**CHAT, "frequency": 7}),
        ("POST", "/tokenize", {"prompt": "hello"}),
    ]
    context = ssl.create_default_context(cafile=str(authority.path))
    async with (
        httpx2.AsyncClient(base_url=stack.http, trust_env=False) as direct,
        httpx2.AsyncClient(base_url=f"http://{proxy.http}", trust_env=False) as through,
        httpx2.AsyncClient(base_url=f"https://{proxy.tls}", trust_env=False, verify=context) as secure,
    ):
        for method, path, body in requests:
            wanted = await direct.request(method, path, json=body)
            for client in (through, secure):
                got = await client.request(method, path, json=body, headers={"x-request-id": "mine"})
                assert got.status_code == wanted.status_code, path
                told, meant = got.json(), wanted.json()
                for text in (told, meant):
                    [entry.pop("created", None) for entry in text.get("data", [])]
                assert told == meant
                assert got.headers["x-request-id"] == "mine"


async def test_a_stream_outlives_a_reload(stack: Stack, proxy: Proxy, authority: Authority) -> None:
    async with proxy.client(tls=authority.path.read_bytes()) as client, sdk(proxy.http) as http:
        call = client.call(long_request())
        messages = aiter(call)
        await first_of(messages)
        stream = await http.chat.completions.create(**ENDLESS)
        chunks = aiter(stream)
        await anext(chunks)
        await proxy.reload()
        await proxy.healthy()
        async with proxy.client() as fresh:
            assert len((await fresh.tokens(PROMPT, max_tokens=3)).token_ids) == 3
        for _ in range(20):
            await first_of(messages)
            await anext(chunks)
        call.cancel()
        await stream.close()
    await stack.whole()


async def test_silence_is_broken_before_the_proxy_ends_the_stream(stack: Stack, another: ProxyOf, proxy: Proxy) -> None:
    """The proxy ends what is silent for 3 s; both workers stand still for 6 s; the gateway speaks each second."""
    async with (
        another(proxy.kind, impatient=True) as impatient,
        impatient.client() as client,
        sdk(impatient.http) as http,
    ):
        call = client.call(long_request())
        messages = aiter(call)
        await first_of(messages)
        stream = await http.chat.completions.create(**ENDLESS)
        chunks = aiter(stream)
        await anext(chunks)
        for name in stack.workers():
            stack.signal(name, signal.SIGSTOP)
        try:
            late = client.call(long_request(3))
            await asyncio.sleep(6)
        finally:
            for name in stack.workers():
                stack.signal(name, signal.SIGCONT)
        assert [token async for message in late for token in message.token_ids]
        for _ in range(500):
            await first_of(messages)
            await anext(chunks)
        call.cancel()
        await stream.close()
    await stack.whole()


async def test_the_gateway_starts_anew_behind_it(stack: Stack, proxy: Proxy) -> None:
    """What runs ends with an error, at once; the proxy finds the new gateway by itself."""
    async with proxy.client() as client, sdk(proxy.http) as http:
        call = client.call(long_request())
        messages = aiter(call)
        await first_of(messages)
        stream = await http.chat.completions.create(**ENDLESS)
        chunks = aiter(stream)
        await anext(chunks)
        pid = stack.signal("gateway", signal.SIGKILL)
        error = await refusal(drained(messages))
        assert error.code() in (Code.UNAVAILABLE, Code.INTERNAL, Code.UNKNOWN)
        assert not await finished(chunks)
        await stack.event("ready", "gateway", after_pid=pid)
        await stack.joined(prefill=1, decode=1)
        await proxy.healthy()
        assert len((await client.tokens(PROMPT, max_tokens=3)).token_ids) == 3
        async with asyncio.timeout(20):
            while True:  # its check of the HTTP port takes a moment of its own
                try:
                    await http.chat.completions.create(**CHAT)
                    break
                except openai.InternalServerError:
                    await asyncio.sleep(0.1)
    await stack.whole()


async def finished(chunks: AsyncIterator[Any]) -> bool:
    """Whether a stream of the SDK's says that it is whole. Caddy ends one that breaks off as if it were."""
    try:
        return any([chunk.choices and chunk.choices[0].finish_reason async for chunk in chunks])
    except (openai.APIError, httpx2.HTTPError):
        return False


async def drained(messages: AsyncIterator[Any]) -> None:
    """Reads to the end."""
    async for _ in messages:
        pass
