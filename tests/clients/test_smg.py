"""The `smg` router, unmodified, with the gateway behind it as one engine: chats through it by the openai SDK."""

import asyncio
import contextlib
import json
import math
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from twostroke.smg import common_pb2
from twostroke.smg.vllm_engine_pb2_grpc import VllmEngineStub
from twostroke.v1 import inference_pb2 as pb

from ..e2e.harness import Launch, Stack

FLAGS = ("--model", "smollm2-135m", "--threads", "1", "--kv-memory", "128MiB")
MODEL = "smollm2-135m"
ASK: list[Any] = [{"role": "user", "content": "Name three colours of the rainbow."}]
START_S = 60.0


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return int(it.getsockname()[1])


@dataclass
class Router:
    """A running router."""

    sdk: AsyncOpenAI
    http: httpx2.AsyncClient
    figures: httpx2.AsyncClient
    log: Path

    async def figure(self, name: str) -> float:
        """The sum over a metric's labels."""
        text = (await self.figures.get("/metrics")).text
        return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE))

    async def worker(self) -> Any:
        """The gateway as the router knows it."""
        [told] = (await self.http.get("/workers")).json()["workers"]
        return told


@contextlib.asynccontextmanager
async def routing(folder: Path, log: Path, *stacks: Stack) -> AsyncIterator[Router]:
    """A router before these stacks, once it answers; killed at the end."""
    port, figures = free_port(), free_port()
    command = [folder / "bin" / "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(figures), "--log-level", "debug"]
    command += ["--health-check-interval-secs", "1", "--worker-urls", *(f"grpc://{each.address}" for each in stacks)]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*map(str, command), stdout=output, stderr=output, env={})
    base = f"http://127.0.0.1:{port}"
    try:
        async with (
            AsyncOpenAI(base_url=base + "/v1", api_key="none", max_retries=0, timeout=100) as sdk,
            httpx2.AsyncClient(base_url=base, trust_env=False) as http,
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{figures}", trust_env=False) as metrics,
        ):
            it = Router(sdk, http, metrics, log)
            async with asyncio.timeout(START_S):
                while not await answers(it):
                    assert process.returncode is None, log.read_text()
                    await asyncio.sleep(0.3)
            yield it
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def answers(it: Router) -> bool:
    """It has met the gateway and has its tokenizer."""
    try:
        await it.sdk.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1)
    except openai.APIStatusError as error:
        assert error.status_code >= 500 or error.status_code == 404, error
        return False
    except openai.APIConnectionError:
        return False
    return True


async def native(stack: Stack, tokens: int, text: str = "") -> str:
    """What gRPC answers to the same chat, or to this text."""
    chat = pb.Chat(messages=[pb.ChatMessage(role=turn["role"], content=turn["content"]) for turn in ASK])
    request = pb.GenerateRequest(
        input=pb.Input(text=text) if text else pb.Input(chat=chat),
        sampling=pb.Sampling(temperature=0),
        stopping=pb.Stopping(max_tokens=tokens),
    )
    return (await stack.client.generate(request)).text


@pytest.fixture
def smg(environment: Callable[[str], Path]) -> Path:
    return environment("smg")


async def chats(stack: Stack, it: Router) -> None:
    """A stream, a whole answer and the native API say the same; the counts are right."""
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 24}
    text = await native(stack, 24)
    whole = await it.sdk.chat.completions.create(**asked)
    assert whole.choices[0].message.content == text
    assert len(text.split()) > 5
    stream = await it.sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert len(chunks) > 10  # tokens come one by one
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (37, 24)
    details = chunks[-1].usage.prompt_tokens_details if chunks[-1].usage else None
    assert details is not None
    assert details.cached_tokens == 32  # the prompt ran before
    stopped = await it.sdk.chat.completions.create(**asked, stop=[text.split()[3]])
    assert stopped.choices[0].finish_reason == "stop"
    assert text.startswith((stopped.choices[0].message.content or "?").rstrip())


async def several(stack: Stack, it: Router) -> None:
    """Answers side by side, log-probabilities, completions."""
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 8}
    both = await it.sdk.chat.completions.create(**asked, n=2, temperature=1.0, seed=5)
    assert sorted(choice.index for choice in both.choices) == [0, 1]
    assert len({choice.message.content for choice in both.choices}) == 2
    scored = await it.sdk.chat.completions.create(**asked, temperature=0, logprobs=True, top_logprobs=2)
    told = scored.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert len(told.content) == 8
    assert all(math.isclose(each.logprob, each.top_logprobs[0].logprob) for each in told.content)  # it was greedy
    begun = "The capital of Italy is"
    text = await it.sdk.completions.create(model=MODEL, prompt=begun, max_tokens=8, temperature=0)
    assert text.choices[0].text == await native(stack, 8, begun)


async def leaves(stack: Stack, it: Router) -> None:
    """A client that leaves mid-stream: the router calls Abort, and the pages are free within moments."""
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    for chunks in (1, 8):
        stream = await it.sdk.chat.completions.create(**asked, stream=True)
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == chunks:
                break
        await stream.close()
        async with asyncio.timeout(10):  # 4,000 tokens take a minute
            await stack.whole()
    whole = asyncio.create_task(it.sdk.chat.completions.create(**asked))
    await asyncio.wait([whole], timeout=1.0)
    whole.cancel()
    await asyncio.gather(whole, return_exceptions=True)
    async with asyncio.timeout(10):
        await stack.whole()
    assert it.log.read_text().count("Abort response received") >= 2


async def errors(it: Router) -> None:
    """What the gateway refuses reaches the client as what it is."""
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 4}
    odd = {"type": "json_schema", "json_schema": {"name": "odd", "schema": {"type": "nonsense"}}}
    for more, message in (
        ({"extra_body": {"stop_token_ids": [70_000]}}, "outside the vocabulary"),
        ({"stop": ["x" * 300]}, "a stop string has 300 characters"),
        ({"response_format": odd}, "the constraint cannot be used"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "context length"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            await it.sdk.chat.completions.create(**{**asked, **more})
    await it.sdk.chat.completions.create(**asked)  # the gateway is still trusted


async def shaped(it: Router) -> None:
    """Structured output."""
    colour = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    answer = await it.sdk.chat.completions.create(
        model=MODEL,
        messages=ASK,
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "one", "schema": {**colour, "additionalProperties": False}},
        },
    )
    assert json.loads(answer.choices[0].message.content or "")["colour"] in ("red", "blue")


async def follows(it: Router, *, blocks: int = 2) -> None:
    """The router's index has the pages that the workers told of."""
    async with asyncio.timeout(20):
        while await it.figure("smg_kv_index_blocks") < blocks:
            await asyncio.sleep(0.2)
    assert "served a state snapshot" in it.log.read_text()


async def healthy(it: Router, *, wanted: bool) -> None:
    async with asyncio.timeout(60):
        while (await it.worker())["is_healthy"] is not wanted:
            await asyncio.sleep(0.2)


async def loses_its_workers(stack: Stack, it: Router) -> None:
    """The router takes the gateway out of its routing, and in again when there are workers."""
    stream = await it.sdk.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(stream.__aiter__())
    stack.process.send_signal(signal.SIGSTOP)  # nobody starts them anew for a while
    for name in stack.workers():
        stack.signal(name, signal.SIGKILL)
    try:
        await healthy(it, wanted=False)
    finally:
        stack.process.send_signal(signal.SIGCONT)
    with contextlib.suppress(openai.APIError):  # it is replayed, or was waited for in vain
        await stream.close()
    await stack.joined(prefill=1, decode=1)
    await healthy(it, wanted=True)
    await it.sdk.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4)


@pytest.mark.slow
async def test_chats_through_the_router(launch: Launch, smollm2_dir: Path, smg: Path, tmp_path: Path) -> None:
    async with launch(*FLAGS) as stack, routing(smg, tmp_path / "smg.log", stack) as it:
        worker = await it.worker()
        assert worker["is_healthy"]
        assert (worker["models"][0]["id"], worker["labels"]["max_num_seqs"]) == (MODEL, "64")
        await chats(stack, it)
        await follows(it)
        await several(stack, it)
        await errors(it)
        await shaped(it)
        await leaves(stack, it)
        await loses_its_workers(stack, it)
        await stack.whole()


@pytest.mark.slow
async def test_a_router_on_another_machine(launch: Launch, smollm2_dir: Path, smg: Path, tmp_path: Path) -> None:
    """It finds none of the model's files at the gateway's path: the gateway sends the tokenizer's."""
    folder = tmp_path / MODEL
    folder.mkdir()
    for file in smollm2_dir.iterdir():
        (folder / file.name).symlink_to(file)
    async with launch("--model", str(folder), *FLAGS[2:]) as stack:
        stub = VllmEngineStub(stack.client.channel)
        [*_, last] = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        assert len(last.sha256) == 64
        folder.rename(tmp_path / "elsewhere")
        async with routing(smg, tmp_path / "smg.log", stack) as it:
            await chats(stack, it)
        await stack.whole()


@pytest.mark.slow
async def test_prompts_go_to_the_gateway_that_has_them(
    launch: Launch, smollm2_dir: Path, smg: Path, tmp_path: Path
) -> None:
    """What was asked at one gateway directly, the router asks there again: it knows from the caches' events alone."""
    flags = (*FLAGS, "--prefill", "0", "--decode", "0", "--both", "1")
    async with (
        launch(*flags) as one,
        launch(*flags) as two,
        routing(smg, tmp_path / "smg.log", one, two) as it,
    ):
        topics = ("painting", "cooking", "sailing", "farming", "weaving", "mining")
        chats = [
            [{"role": "user", "content": f"Explain {topic} to me. " + f"I have never heard of {topic}. " * 12}]
            for topic in topics
        ]
        for index, chat in enumerate(chats):
            message = pb.ChatMessage(role="user", content=chat[0]["content"])
            request = pb.GenerateRequest(
                input=pb.Input(chat=pb.Chat(messages=[message])), stopping=pb.Stopping(max_tokens=2)
            )
            await (one, two)[index % 2].client.generate(request)
        await follows(it, blocks=30)
        for chat in chats:
            asked: Any = chat
            answer = await it.sdk.chat.completions.create(model=MODEL, messages=asked, max_tokens=2)
            usage = answer.usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            assert (usage.prompt_tokens_details.cached_tokens or 0) > 64, chat  # more than the template's beginning
