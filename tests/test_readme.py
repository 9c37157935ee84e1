"""What the README shows must work as shown."""

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import grpc
import pytest

from twostroke.services.cli import main
from twostroke.services.configure import load
from twostroke.services.settings import WorkerSettings
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import inference_pb2_grpc

from .services.http_client import served
from .services.stand_in_worker import StandIn
from .tiny import make_tiny_llama

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


class Gateway(inference_pb2_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []

    def Generate(self, request: pb.GenerateRequest, context: object) -> Iterator[pb.GenerateResponse]:  # type: ignore[override]  # noqa: N802
        self.requests.append(request)
        yield pb.GenerateResponse(token_ids=[1], text="Because.")
        finish = pb.Finish(usage=pb.Usage(output_tokens=1), timings=pb.Timings(first_token_us=42))
        yield pb.GenerateResponse(first_index=1, finish=finish)


def test_the_python_client() -> None:
    gateway = Gateway()
    server = grpc.server(ThreadPoolExecutor(1))
    inference_pb2_grpc.add_InferenceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        (code,) = (block for block in blocks("python") if "import grpc" in block)
        assert "127.0.0.1:50051" in code
        code = code.replace("127.0.0.1:50051", f"127.0.0.1:{port}")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    finally:
        server.stop(0)
    assert (done.stdout, done.stderr) == ("Because.\n1 tokens, first after 42 us\n", "")
    assert gateway.requests[0].input.chat.messages[0].content == "Why is the sky blue?"
    assert gateway.requests[0].stopping.max_tokens == 100


async def test_the_openai_client(tmp_path: Path) -> None:
    (code,) = (block for block in blocks("python") if "import OpenAI" in block)
    async with served(make_tiny_llama(tmp_path / "llama"), StandIn("both", "b0")) as it:
        assert "http://127.0.0.1:8000/v1" in code
        code = code.replace("127.0.0.1:8000", it.it.gateway.http_address).replace("smollm2-135m", "llama")
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        assert (process.returncode, len(out)) == (0, 30)  # of the stand-in's tokens each is a character
        (line,) = (line for block in blocks("sh") for line in block.splitlines() if line.startswith("curl"))
        words = shlex.split(line)
        assert words[1] == "http://127.0.0.1:8000/v1/chat/completions"
        assert words[2:4] == ["-H", "Content-Type: application/json"]
        answer = await it.http.post(words[1][len("http://127.0.0.1:8000") :], json=json.loads(words[-1]))
        assert answer.text.endswith("data: [DONE]\n\n")


def shown_commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    words = [shlex.split(line.rpartition("| ")[2], comments=True) for line in lines]
    return [command[1:] for command in words if command and command[0].endswith("/twostroke")]


@pytest.mark.parametrize("words", shown_commands(), ids=" ".join)
def test_the_commands(words: list[str]) -> None:
    context = main.make_context("twostroke", list(words))
    while isinstance(context.command, click.Group):
        name, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None
        context = command.make_context(name, rest, parent=context)


def test_the_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert re.search(rf"(?m)^{target}:", makefile), target


def test_the_settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TWOSTROKE_"):
            monkeypatch.delenv(name)
    (text,) = blocks("toml")
    (tmp_path / "t.toml").write_text(text)
    assert load(WorkerSettings, {"role": "both"}, tmp_path / "t.toml").max_batch == 8


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert "LICENSE" in links
    later = {"docs/architecture.md", "docs/operations.md"}  # come with their own changes
    assert all((ROOT / link).exists() for link in links if link not in later)
