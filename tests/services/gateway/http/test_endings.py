"""How requests over HTTP end when they do not end well: errors before and after the first event, clients that leave."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from twostroke.services.gateway.served_model import ServedModel
from twostroke.v1 import worker_pb2 as wpb

from ...cluster import until
from ...http_client import USER, raw, request_bytes, served
from ...stand_in_worker import Script, StandIn

PATH = "/v1/chat/completions"
LONG = {"messages": USER, "stream": True}


def prefill(**script: Any) -> StandIn:
    return StandIn("prefill", "p0", Script(**script))


def decode(**script: Any) -> StandIn:
    return StandIn("decode", "d0", Script(**script))


# Errors


async def test_an_error_after_the_first_event_is_told_in_band(tiny_llama_dir: Path) -> None:
    fail = (wpb.FAILURE_CODE_DEADLINE, "the deadline passed")
    async with served(tiny_llama_dir, prefill(), decode(mute_after=5, fail=fail)) as it:
        response = await it.post(PATH, LONG)
        assert response.status_code == 200
        *_, error, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        told = json.loads(error.removeprefix("data: "))["error"]
        assert (told["type"], told["code"]) == ("timeout_error", "deadline_exceeded")
        stream = await it.sdk.chat.completions.create(model="llama", messages=USER, stream=True)
        chunks = stream.__aiter__()
        assert (await anext(chunks)).choices[0].delta.role == "assistant"
        told: list[str | None] = []

        async def read() -> None:
            async for chunk in chunks:
                told.append(chunk.choices[0].delta.content)

        with pytest.raises(openai.APIError, match="the deadline passed"):
            await read()
        assert all(told)
        assert 1 <= len(told) <= 5  # tokens that come at once may be one chunk
        plain = await it.refused(PATH, {"messages": USER})
        assert (plain[0], plain[1]["code"]) == (504, "deadline_exceeded")


async def test_a_deadline(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, prefill(mute_after=0), decode(mute_after=0)) as it:
        decodes = it.it.worker("d0").submits
        for seconds in (0.2, 2, 20):  # the first that the machine is quick enough for
            status, error = await it.refused(PATH, LONG, x_request_timeout=str(seconds))
            assert (status, error["code"]) == (504, "deadline_exceeded")
            if decodes:
                break
        assert 0 < decodes[0].timeout_ms <= 1000 * seconds
        for wrong in ("x", "0", "-1", "nan", "inf"):
            status, error = await it.refused(PATH, LONG, x_request_timeout=wrong)
            assert (status, error["param"]) == (400, "x-request-timeout")
        assert (await it.refused(PATH, LONG, x_request_id="x" * 129))[1]["param"] == "x-request-id"


async def test_a_full_gateway_says_when_to_come_back(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, prefill(mute_after=0), decode(mute_after=0), max_queue=2) as it:
        waiting = asyncio.create_task(it.post(PATH, {**LONG, "n": 2}))
        await until(lambda: it.it.gateway.admission.inside == 2)
        response = await it.post(PATH, LONG)
        assert response.status_code == 429
        assert 1000 <= int(response.headers["retry-after-ms"]) <= 1250
        assert response.headers["retry-after"] in ("1", "2")
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        with pytest.raises(openai.RateLimitError):
            await it.sdk.chat.completions.create(model="llama", messages=USER)
        waiting.cancel()


async def test_nobody_there(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir) as it:
        response = await it.post(PATH, LONG)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert "none is configured" in response.json()["error"]["message"]
        assert (await it.http.get("/health")).status_code == 503


async def test_several_prompts_fail_as_one(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, prefill(mute_after=0), decode(mute_after=0)) as it:
        status, error = await it.refused("/v1/completions", {"prompt": ["x", [1] * 5000], "max_tokens": 5})
        assert (status, error["code"]) == (400, "context_length_exceeded")


async def test_a_fault_of_ours_tells_nothing_of_the_prompt(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(self: ServedModel, source: Any) -> list[int]:
        raise ZeroDivisionError(f"cannot do {source}")

    async with served(tiny_llama_dir, prefill(), decode()) as it:
        monkeypatch.setattr(ServedModel, "prompt_ids", fail)
        status, error = await it.refused(PATH, {"messages": [{"role": "user", "content": "a secret"}]})
    assert (status, error["message"]) == (500, "internal error (ZeroDivisionError)")
    assert "ZeroDivisionError" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "code"),
    [
        ("GET", "/", {}, b"", 404, "not_found"),
        ("POST", "/v1/embeddings", {}, b"", 404, "not_found"),
        ("GET", "/v1/models/", {}, b"", 404, "not_found"),
        ("GET", "/v1/models/other/name", {}, b"", 404, "model_not_found"),
        ("GET", PATH, {}, b"", 405, "method_not_allowed"),
        ("DELETE", "/health", {}, b"", 405, "method_not_allowed"),
        ("POST", PATH, {"content-type": "text/plain"}, b"{}", 415, "unsupported_media"),
        ("POST", PATH, {"content-type": ""}, b"{}", 415, "unsupported_media"),
        ("POST", PATH, {}, b"", 400, "invalid_json"),
        ("POST", PATH, {}, b"{", 400, "invalid_json"),
        ("POST", PATH, {}, b"[" * 1000, 400, "invalid_json"),
        ("POST", PATH, {}, b'{"messages": "\xff"}', 400, "invalid_json"),
        ("POST", PATH, {}, b'{"messages": "\\ud800"}', 400, "invalid_json"),
        ("POST", PATH, {}, b'{"top_p": NaN}', 400, "invalid_json"),
        ("POST", PATH, {}, b" " * 70_000, 413, "request_too_large"),
    ],
)
async def test_what_is_no_request_of_ours(
    tiny_llama_dir: Path, method: str, path: str, headers: dict[str, str], body: bytes, status: int, code: str
) -> None:
    async with served(tiny_llama_dir, decode(), max_message_bytes=1 << 16) as it:
        told = {"content-type": "application/json", **headers}
        response = await it.http.request(method, path, content=body, headers=told)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert (await it.http.get("/health")).status_code == 200  # the connection can be used


async def test_a_body_of_unknown_length_is_bounded_too(tiny_llama_dir: Path) -> None:
    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 10_000

    async with served(tiny_llama_dir, decode(), max_message_bytes=1 << 16) as it:
        response = await it.http.post(PATH, content=chunks(), headers={"content-type": "application/json"})
        assert response.status_code == 413


HEAVY = {
    "lists": b"[" + b",".join([b"[" * 100 + b"]" * 100] * 1500) + b"]",
    "names": b"{" + b",".join(b'"%d":1' % i for i in range(130_000)) + b"}",
    "objects": b"[" + b",".join([b"{}"] * 250_000) + b"]",
    "tokens": b"[" + b",".join([b"1"] * 600_000) + b"]",
}


@pytest.mark.parametrize("kind", HEAVY)
async def test_a_body_that_is_too_much_work_is_refused_before_it_is_parsed(tiny_llama_dir: Path, kind: str) -> None:
    async with served(tiny_llama_dir, decode()) as it:
        body = b'{"prompt": %b}' % HEAVY[kind]
        response = await it.http.post(PATH, content=body, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        assert "values" in response.json()["error"]["message"]


async def test_long_texts_and_many_tokens_are_no_such_work(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, decode()) as it:
        for prompt in (json.dumps('say "so", {then}: [go] \n' * 10_000), "[" + ",".join(["7"] * 500_000) + "]"):
            body = b'{"prompt": %b}' % prompt.encode()
            assert len(body) > 1 << 18
            response = await it.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


# Clients that leave

PHASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "before token 0": ({"mute_after": 0}, {"mute_after": 0}, 0),
    "between token 0 and 1": ({}, {"mute_after": 0}, 1),
    "while decoding": ({}, {"mute_after": 12}, 5),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", list(PHASES))
async def test_a_client_that_leaves_frees_everything_at_once(tiny_llama_dir: Path, phase: str, stream: bool) -> None:
    on_p, on_d, events = PHASES[phase]
    async with served(tiny_llama_dir, prefill(**on_p), decode(**on_d)) as it:
        reader, writer = await raw(it.place)
        writer.write(request_bytes(PATH, {**LONG, "stream": stream, "n": 2}))
        if stream:
            for _ in range(events):
                await reader.readuntil(b"content")
        await until(lambda: it.it.worker("d0").submits)
        assert it.it.gateway.admission.inside == 2
        writer.close()
        await it.it.idle()
        number = it.it.worker("d0").submits[0].request
        await until(lambda: it.it.worker("p0").cancels[number] and it.it.worker("d0").cancels[number])
        await until(lambda: 'path="/v1/chat/completions",status="499"} 1.0' in it.it.gateway.figures.text().decode())


async def test_the_sdk_leaves_a_stream(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, prefill(), decode(mute_after=12)) as it:
        stream = await it.sdk.chat.completions.create(model="llama", messages=USER, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await it.it.idle()


async def test_a_client_that_leaves_while_it_sends_its_body(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, decode()) as it:
        _, writer = await raw(it.place)
        writer.write(request_bytes(PATH, LONG)[:-5])
        await until(lambda: it.it.gateway.http and it.it.gateway.http.connections == 1)
        writer.close()
        await until(lambda: it.it.gateway.http and it.it.gateway.http.connections == 0)
        await until(lambda: 'status="499"} 1.0' in it.it.gateway.figures.text().decode())
        assert not it.it.worker("d0").submits


async def test_a_client_that_leaves_while_a_long_prompt_is_tokenized(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def wait(self: ServedModel, source: Any) -> list[int]:
        started.set()
        await release.wait()
        return [1]

    async with served(tiny_llama_dir, decode()) as it:
        monkeypatch.setattr(ServedModel, "prompt_ids", wait)
        for path, body in ((PATH, LONG), ("/tokenize", {"prompt": "x"}),
                           ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1})):  # fmt: skip
            started.clear()
            _, writer = await raw(it.place)
            writer.write(request_bytes(path, body))
            await started.wait()
            writer.close()
            await until(lambda: it.it.gateway.admission.inside == 0)
        assert not it.it.worker("d0").submits


async def test_silence_is_broken_by_comments(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, prefill(mute_after=0), decode(mute_after=0), keep_alive_s=0.05) as it:
        async with it.http.stream("POST", PATH, json=LONG) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            await anext(lines)
            assert await anext(lines) == ": keep-alive"
        status = await it.refused(PATH, {"messages": USER}, x_request_timeout="0.2")  # a plain answer has no comments
        assert status[0] == 504
        for seconds in ("0.2", "2", "20"):  # the first that the machine is quick enough for
            response = await it.post(PATH, LONG, x_request_timeout=seconds)
            if response.status_code == 200:
                break
        *comments, error, done, _ = response.text.split("\n\n")
        assert set(comments) == {": keep-alive"}
        assert "deadline_exceeded" in error
        assert done == "data: [DONE]"
    async with served(tiny_llama_dir, prefill(mute_after=0), decode(mute_after=0), keep_alive_s=0) as it:
        status = await it.refused(PATH, LONG, x_request_timeout="0.2")  # no comment went out before
        assert status[0] == 504


async def test_a_client_that_does_not_read_is_told_why_its_stream_ended(tiny_llama_dir: Path) -> None:
    """What it was sent is bounded; nothing is held for it any longer; the reason waits for it behind the rest."""
    script = {"tokens": [10] * 1500}
    async with served(tiny_llama_dir, prefill(**script), decode(**script), slow_reader_s=0.3) as it:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(it.place)
        client.setblocking(False)
        client.send(request_bytes(PATH, {**LONG, "logprobs": True, "top_logprobs": 20}))
        await until(lambda: 'status="429"} 1.0' in it.it.gateway.figures.text().decode())
        await it.it.idle()
        reader, writer = await asyncio.open_connection(sock=client)
        text = await reader.read()
        assert len(text) < 1 << 20
        assert b"the client reads too slowly" in text[-300:]
        assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()


# Drain


async def test_drain(tiny_llama_dir: Path) -> None:
    """What runs ends well on a connection that says it closes; what is new is refused, and health says so."""
    async with served(tiny_llama_dir, prefill(pause_s=0.02), decode(pause_s=0.02)) as it:
        reader, writer = await raw(it.place)
        writer.write(request_bytes(PATH, LONG))
        await reader.readuntil(b"content")
        idle = await raw(it.place)
        drain = asyncio.create_task(it.it.gateway.drain(20, asyncio.Event()))
        assert await idle[0].read() == b""
        async with httpx2.AsyncClient(base_url=it.http.base_url, trust_env=False) as late:
            assert (await late.get("/health")).status_code == 503
            response = await late.post(PATH, json=LONG)
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        rest = await reader.read()
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        await drain
        writer.close()
        idle[1].close()


async def test_a_drain_that_takes_too_long_is_told(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, prefill(), decode(mute_after=5)) as it:
        call = asyncio.create_task(it.post(PATH, LONG))
        await until(lambda: it.it.gateway.admission.inside)
        await it.it.gateway.drain(0.3, asyncio.Event())
        text = (await call).text
        assert '"code": "service_unavailable"' in text
        assert text.endswith("data: [DONE]\n\n")
