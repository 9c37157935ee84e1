"""The client behind `generate`, against a real gRPC server that answers as told."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import click
import grpc.aio
import pytest

from twostroke.errors import DeadlineExceeded, InvalidRequest, Overloaded, TwostrokeError, Unavailable
from twostroke.services.cli import main
from twostroke.services.client.client import Client, Measured
from twostroke.services.commands.bench import bench, make_plan
from twostroke.services.commands.chat import build_request as build_chat
from twostroke.services.commands.chat import chat
from twostroke.services.commands.generate import build_request, generate, printable, summary
from twostroke.services.supervisor.machine import free_ports
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import inference_pb2_grpc

OPTIONS: dict[str, Any] = {
    "model": "", "system": None, "temperature": None, "top_k": None, "top_p": None, "seed": None, "max_tokens": None,
    "stop": (), "stop_token": (), "ignore_eos": False, "logprobs": None, "raw": False, "min_p": None, "typical_p": None,
    "repetition_penalty": None, "presence_penalty": None, "frequency_penalty": None, "bias": {}, "allow_token": (),
    "ban_token": (), "bad_word": (), "min_tokens": 0, "include_stop": False, "prompt_logprobs": None,
    "priority": 0,
}  # fmt: skip
TEXTS = ["The ", "sky", " is \x1b[31mblue", "\u00e9\U0001f30d"]


class Gateway(inference_pb2_grpc.InferenceServicer):
    """Answers TEXTS, one token each, or with `error` after `after` of them; `hang` never ends."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.error: tuple[grpc.StatusCode, str] | None = None
        self.after = 0
        self.hang = False
        self.chat = True
        self.cancelled = asyncio.Event()

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:  # noqa: N802
        if request.model == "other":
            await context.abort(grpc.StatusCode.NOT_FOUND, "model 'other' is not served here: it is 'tiny'")
        return pb.GetModelResponse(model="tiny", has_chat_template=self.chat)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        self.requests.append(request)
        try:
            for index, text in enumerate(TEXTS):
                if self.error is not None and index == self.after:
                    await context.abort(*self.error)
                yield pb.GenerateResponse(first_index=index, token_ids=[index + 5], text=text)
                for sample in range(1, request.n):
                    yield pb.GenerateResponse(first_index=index, token_ids=[9], text=f"{sample}", sample=sample)
            if self.hang:
                await asyncio.Event().wait()
            finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH, seed=9, prefill_worker="p-0", decode_worker="d-0")
            finish.usage.CopyFrom(pb.Usage(prompt_tokens=3, cached_tokens=1, output_tokens=4))
            finish.timings.CopyFrom(pb.Timings(queue_us=1500, prefill_us=2000, transfer_us=2500, gap01_us=7000))
            for sample in reversed(range(request.n or 1)):
                yield pb.GenerateResponse(first_index=4, finish=finish, sample=sample)
        finally:
            self.cancelled.set()


@pytest.fixture
async def gateway() -> AsyncIterator[tuple[Gateway, str]]:
    server, servicer = grpc.aio.server(), Gateway()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(0)


async def test_streams_and_measures(gateway: tuple[Gateway, str]) -> None:
    _, address = gateway
    measured = Measured()
    async with Client(address) as client:
        assert (await client.model()).model == "tiny"
        pieces = [piece async for piece in client.generate(pb.GenerateRequest(), 10, measured)]
    assert [piece.text for piece in pieces] == [*TEXTS, ""]
    assert pieces[-1].finish.seed == 9
    assert measured.tokens == 4
    assert 0 < measured.first_token_s <= measured.first_token_s + measured.gap01_s <= measured.last_token_s
    assert measured.tokens_per_s > 0


def test_measured_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.5, 1.5, 3.0])
    monkeypatch.setattr("twostroke.services.client.client.time.monotonic", lambda: next(clock))
    measured = Measured(started=next(clock))
    measured.note(1)
    measured.note(0)
    measured.note(2)
    measured.note(2)
    assert (measured.first_token_s, measured.gap01_s, measured.last_token_s, measured.tokens) == (1.0, 0.5, 3.0, 5)
    assert measured.tokens_per_s == pytest.approx(2.0)
    assert Measured().tokens_per_s == 0


def test_several_answers_are_measured_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.25, 1.5, 2.0, 3.0])
    monkeypatch.setattr("twostroke.services.client.client.time.monotonic", lambda: next(clock))
    measured = Measured(started=next(clock))
    for answer in (2, 0, 0, 2, 1):
        measured.note(1, answer)
    assert (measured.first_token_s, measured.gap01_s, measured.last_token_s, measured.tokens) == (1.0, 1.0, 3.0, 5)


async def test_no_gateway() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    async with Client(address) as client:
        with pytest.raises(Unavailable) as caught:
            await client.model()
    assert caught.value.message == (
        f"no gateway answers at {address}: start one with `twostroke up`, or name another with --address"
        " (Connection refused)"
    )


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.INTERNAL, TwostrokeError),
    ],
)
async def test_errors_keep_their_words(
    gateway: tuple[Gateway, str], code: grpc.StatusCode, kind: type[TwostrokeError]
) -> None:
    servicer, address = gateway
    servicer.error, servicer.after = (code, "so it is"), 2
    texts = []
    async with Client(address) as client:
        with pytest.raises(kind) as caught:  # noqa: PT012 - what came before the error counts
            async for piece in client.generate(pb.GenerateRequest(), 10, Measured()):
                texts.append(piece.text)
    assert texts == TEXTS[:2]
    assert caught.value.message == f"so it is ({code.name})"


async def test_a_deadline(gateway: tuple[Gateway, str]) -> None:
    servicer, address = gateway
    servicer.hang = True
    async with Client(address) as client:
        with pytest.raises(DeadlineExceeded, match=r"^the deadline passed before the answer was complete"):
            _ = [piece async for piece in client.generate(pb.GenerateRequest(), 0.2, Measured())]


async def test_leaving_cancels_the_call(gateway: tuple[Gateway, str]) -> None:
    servicer, address = gateway
    servicer.hang = True
    async with Client(address) as client:
        stream = client.generate(pb.GenerateRequest(), None, Measured())
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(servicer.cancelled.wait(), 5)


def test_requests_hold_what_was_given_and_no_more() -> None:
    request = build_request("hi", OPTIONS, chat=True)
    assert [(m.role, m.content) for m in request.input.chat.messages] == [("user", "hi")]
    absent = ("temperature", "top_k", "top_p", "seed")
    assert not any(request.sampling.HasField(name) for name in absent)  # type: ignore[arg-type]
    assert not request.stopping.HasField("max_tokens")
    assert not request.HasField("logprobs")
    given = {"temperature": 0.0, "top_k": 0, "top_p": 0.5, "seed": 2**64 - 1, "max_tokens": 3, "logprobs": 0}
    given |= {"stop": ("a", "b"), "stop_token": (7,), "ignore_eos": True, "model": "tiny", "priority": -7}
    request = build_request("hi", {**OPTIONS, **given}, chat=False)
    assert request.input.text == "hi"
    assert all(request.sampling.HasField(name) for name in absent)  # type: ignore[arg-type]
    assert (request.sampling.seed, request.stopping.max_tokens, request.model) == (2**64 - 1, 3, "tiny")
    assert (list(request.stopping.strings), list(request.stopping.token_ids)) == (["a", "b"], [7])
    assert request.stopping.ignore_eos
    assert request.HasField("logprobs")
    assert request.priority == -7


def test_every_command_that_asks_takes_a_priority() -> None:
    whole = click.Context(main, **main.context_settings)
    for name, command in (("generate", generate), ("chat", chat), ("bench", bench)):
        params = command.make_context(name, ["--priority", "-3"], parent=whole).params
        if name == "bench":
            assert make_plan(params).options.priority == -3
        else:
            build = build_chat if name == "chat" else partial(build_request, "hi", chat=True)
            assert build(params).priority == -3
        for wrong in ("2147483648", "-2147483649", "high"):
            with pytest.raises(click.BadParameter) as caught:
                command.make_context(name, ["--priority", wrong], parent=whole)
            assert caught.value.param is not None
            assert caught.value.param.name == "priority"


def test_a_system_message_needs_a_chat() -> None:
    request = build_request("hi", {**OPTIONS, "system": "be brief"}, chat=True)
    assert [m.role for m in request.input.chat.messages] == ["system", "user"]
    with pytest.raises(TwostrokeError, match="system:"):
        build_request("hi", {**OPTIONS, "system": "be brief"}, chat=False)


def test_the_terminal_is_not_steered() -> None:
    assert printable("a\x1b[31mb\x07\r\x9b\x7f\n\tz\u00e9\U0001f30d") == "a[31mb\n\tz\u00e9\U0001f30d"


def test_a_summary() -> None:
    finish = pb.Finish(reason=pb.FINISH_REASON_STOP, seed=1, prefill_worker="both-0", decode_worker="both-0")
    finish.usage.CopyFrom(pb.Usage(prompt_tokens=3, cached_tokens=0, output_tokens=1))
    first, second = summary(finish, Measured(first_token_s=0.25, last_token_s=0.25, tokens=1)).splitlines()
    assert first == "[1 tokens (stopped), first token 250 ms]"
    assert second.endswith("both-0, seed 1]")
    assert "->" not in second


async def run(*words: str, stdin: bytes | None = None, **variables: str) -> tuple[int, str, str]:
    """The real command in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "twostroke.services.cli", "generate", *words,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **variables},
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(stdin), 30)
    return process.returncode or 0, out.decode(), err.decode()


async def test_the_command_streams_text(gateway: tuple[Gateway, str]) -> None:
    servicer, address = gateway
    code, out, err = await run("--address", address, "why", "blue?")
    assert (code, out) == (0, "".join(TEXTS) + "\n")  # piped: bytes as they came
    assert "4 tokens (length reached), first token " in err
    assert "gap01 7.0 ms" in err
    assert "prompt 3 tokens, 1 cached, queue 1.5 ms, prefill 2.0 ms, transfer 2.5 ms, p-0 -> d-0, seed 9" in err
    assert servicer.requests[0].input.chat.messages[0].content == "why blue?"


async def test_several_answers_come_one_after_another(gateway: tuple[Gateway, str]) -> None:
    servicer, address = gateway
    code, out, err = await run("--address", address, "--n", "3", "why")
    assert (code, out) == (0, "".join(TEXTS) + "\n\n1111\n\n2222\n")
    assert servicer.requests[0].n == 3
    assert "12 tokens, 3 answers, first token " in err
    code, out, err = await run("--address", address, "--n", "17", "why")
    assert (code, out) == (2, "")


async def test_the_command_reads_stdin_and_writes_json(gateway: tuple[Gateway, str]) -> None:
    servicer, address = gateway
    servicer.chat = False
    code, out, err = await run("--json", stdin="h\u00e9\n".encode(), TWOSTROKE_ADDRESS=address)
    lines = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [line.get("text", "") for line in lines] == [*TEXTS, ""]
    assert lines[1] == {"first_index": 1, "token_ids": [6], "text": "sky"}
    assert lines[-1]["finish"]["usage"]["output_tokens"] == 4
    assert lines[-1]["client"]["tokens"] == 4
    assert servicer.requests[0].input.text == "h\u00e9"


async def test_the_command_fails_readably(gateway: tuple[Gateway, str]) -> None:
    servicer, address = gateway
    code, out, err = await run("--address", address, "--model", "other", "hi")
    assert (code, out) == (1, "")
    assert err == "error: model 'other' is not served here: it is 'tiny' (NOT_FOUND)\n"
    servicer.error, servicer.after = (grpc.StatusCode.UNAVAILABLE, "worker d-0 is gone"), 1
    code, out, err = await run("--address", address, "hi")
    assert (code, out, err) == (1, "The \n", "error: worker d-0 is gone (UNAVAILABLE)\n")
    code, out, err = await run("--address", f"127.0.0.1:{free_ports(1)[0]}", "hi")
    assert code == 1
    assert "start one with `twostroke up`" in err
    code, out, err = await run("--address", address, stdin=b"")
    assert code == 2
    assert err.startswith("error: prompt: got nothing")
    code, out, err = await run("--prompt", "a", "b")
    assert (code, err) == (2, "error: prompt: got both --prompt and words, takes one of them\n")
    code, out, err = await run("--address", address, stdin=b"\xff\xfe")
    assert (code, out, err) == (2, "", "error: prompt: got bytes that are not utf-8, takes a text\n")
    for flag, name in (("--prompt", "prompt"), ("--system", "system"), ("--stop", "stop"), ("--model", "model")):
        code, out, err = await run("--address", address, flag, "\udcff", *([] if flag == "--prompt" else ["hi"]))
        assert (code, out, err) == (2, "", f"error: {name}: got bytes that are not utf-8, takes a text\n")
    servicer.error = (grpc.StatusCode.INVALID_ARGUMENT, "top_p is 3")
    servicer.after = 0
    code, out, err = await run("--address", address, "hi")
    assert (code, out, err) == (1, "", "error: top_p is 3 (INVALID_ARGUMENT)\n"), "no empty line before the error"
    code, out, err = await run("--address", "nowhere", "hi")
    assert (code, err) == (2, "error: address: got 'nowhere', takes an address, host:port\n")


async def test_an_output_whose_encoding_lacks_a_character_replaces_it(gateway: tuple[Gateway, str]) -> None:
    code, out, _ = await run("--address", gateway[1], "hi", PYTHONIOENCODING="ascii")
    assert (code, out) == (0, "".join(TEXTS).encode("ascii", "replace").decode() + "\n")


async def test_ctrl_c_cancels(gateway: tuple[Gateway, str]) -> None:
    servicer, address = gateway
    servicer.hang = True
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "twostroke.services.cli", "generate", "--address", address, "hi",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readuntil(b"blue"), 20)
    process.send_signal(2)
    _, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 130
    assert b"Traceback" not in err
    await asyncio.wait_for(servicer.cancelled.wait(), 5)


INTERRUPTED = """
import signal, sys, threading
from twostroke.services.cli import main

def interrupt():
    sys.stdin.read(1)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
main(sys.argv[1:])
"""


async def test_ctrl_c_is_not_missed_by_a_loop_that_waits(gateway: tuple[Gateway, str]) -> None:
    """The signal comes to another thread, as it comes to the loop's between its last look and its wait: no EINTR."""
    servicer, address = gateway
    servicer.hang = True
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", INTERRUPTED, "generate", "--address", address, "hi",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        await asyncio.wait_for(process.stdout.readuntil(TEXTS[-1].encode()), 20)
        await asyncio.sleep(0.2)
        process.stdin.write(b"x")
        assert await asyncio.wait_for(process.wait(), 20) == 130
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
