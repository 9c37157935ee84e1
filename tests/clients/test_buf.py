"""`buf curl`, unmodified, against real processes: what a program in Go sees that knows the API by reflection alone."""

import asyncio
import base64
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.rpc import error_details_pb2

from twostroke.services.security.api_keys import new_key

from ..e2e.harness import Launch
from ..services.certificates import Authority
from .conftest import Done, run

FLAGS = ("--model", "smollm2-135m", "--threads", "1", "--kv-memory", "128MiB")
PROTOS = Path(__file__).parent.parent.parent / "protos" / "twostroke"
GENERATE = "twostroke.v1.Inference/Generate"
LONG = {"input": {"text": "Once"}, "stopping": {"maxTokens": 2500, "ignoreEos": True}}


class Buf:
    """The program, with the words that every call takes."""

    def __init__(self, folder: Path, base: str, *words: str) -> None:
        [self.program] = folder.glob("node_modules/@bufbuild/buf-*/bin/buf")  # what is in front would outlive a kill
        self.base = base
        self.words = ("curl", "--protocol", "grpc", *words)

    def command(self, method: str, body: Any, *, timeout: str = "60s") -> tuple[str, ...]:
        call = (*self.words, "--data", json.dumps(body), f"{self.base}/{method}")
        return (str(self.program), "--timeout", timeout, *call)

    async def __call__(self, method: str, body: Any, **options: Any) -> Done:
        return await run(*self.command(method, body, **options))

    async def listed(self) -> set[str]:
        """The services that reflection tells of."""
        return set((await run(self.program, *self.words, "--list-services", self.base)).output.split())


@pytest.fixture
def buf(environment: Callable[[str], Path]) -> Callable[..., Buf]:
    folder = environment("buf")
    return lambda base, *words: Buf(folder, base, *words)


def messages(text: str) -> Iterator[Any]:
    """JSON values, one after the other."""
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        yield value
        text = text[end:].strip()


def details(error: Any) -> dict[str, Any]:
    """Of a status, by kind."""
    kinds = {kind.DESCRIPTOR.full_name: kind for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest)}
    return {
        packed["type"]: kinds[packed["type"]].FromString(base64.b64decode(packed["value"] + "=="))
        for packed in error["details"]
    }


async def test_by_reflection(launch: Launch, smollm2_dir: Path, buf: Callable[..., Buf]) -> None:
    async with launch(*FLAGS) as stack:
        it = buf(f"http://{stack.address}")
        services = await it.listed()
        assert {"twostroke.v1.Inference", "twostroke.v1.Cluster", "inference.GRPCInferenceService"} <= services

        asked = {"input": {"text": "Once upon a time"}, "stopping": {"maxTokens": 12}, "sampling": {"temperature": 0}}
        done = await it(GENERATE, asked)
        assert done.code == 0, done.errors
        pieces = list(messages(done.output))
        text = "".join(piece.get("text", "") for piece in pieces)
        assert (len(pieces), len(text.split()) > 5) == (12, True)
        finish = pieces[-1]["finish"]
        assert (finish["prefillWorker"], finish["decodeWorker"]) == ("prefill-0", "decode-0")

        tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
        whole = {
            "inputs": [tensor | {"contents": {"bytesContents": [base64.b64encode(b"Once upon a time").decode()]}}],
            "parameters": {"temperature": {"int64Param": 0}, "max_tokens": {"int64Param": 12}},
        }
        done = await it("inference.GRPCInferenceService/ModelInfer", whole)
        [answer] = messages(done.output)
        [told] = answer["outputs"][0]["contents"]["bytesContents"]
        assert base64.b64decode(told).decode() == "Once upon a time" + text

        done = await it(GENERATE, asked | {"sampling": {"topP": 7}})
        assert done.code == 3 << 3  # INVALID_ARGUMENT
        [error] = messages(done.errors)
        assert error["code"] == "invalid_argument"
        rich = details(error)
        assert rich["google.rpc.ErrorInfo"].reason == "INVALID_REQUEST"
        assert rich["google.rpc.BadRequest"].field_violations[0].field == "sampling.top_p"
        done = await it(GENERATE, asked | {"model": "gpt-5"})
        assert (done.code, "is not served here" in done.errors) == (5 << 3, True)

        done = await it(GENERATE, LONG, timeout="5s")
        assert (done.code, "deadline_exceeded" in done.errors) == (4 << 3, True)
        assert list(messages(done.output))
        await stack.whole()

        process = await asyncio.create_subprocess_exec(*it.command(GENERATE, LONG), stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        await process.stdout.readline()
        process.kill()
        await process.communicate()
        await stack.whole()


async def test_with_certificates_and_keys(
    launch: Launch, smollm2_dir: Path, tmp_path: Path, buf: Callable[..., Buf]
) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    pair = ours.issue("localhost")
    key, kept = new_key("acme")
    (tmp_path / "keys").write_text(kept.line() + "\n")
    secured = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--api-keys", str(tmp_path / "keys"))
    async with launch(*FLAGS, *secured) as stack:
        base = f"https://localhost:{stack.address.rpartition(':')[2]}"
        admin = next(event for event in stack.events if event["event"] == "serving")["admin"]
        shutil.copytree(PROTOS, tmp_path / "protos" / "twostroke")
        schema = ("--schema", str(tmp_path / "protos"))  # reflection is for the admin here
        show = ("-H", f"authorization: Bearer {key}")
        asked = {"input": {"text": "Once upon a time"}, "stopping": {"maxTokens": 5}}
        it = buf(base, "--cacert", str(ours.path), *schema, *show)
        async with asyncio.timeout(60):
            while (done := await it(GENERATE, asked)).code == 14 << 3:  # no worker yet
                await asyncio.sleep(0.2)
        assert done.code == 0, done.errors
        assert len(list(messages(done.output))) == 5
        done = await buf(base, "--cacert", str(ours.path), *schema)(GENERATE, asked)
        assert (done.code, "no credentials" in done.errors) == (16 << 3, True)
        done = await buf(base, "--cacert", str(theirs.path), *schema, *show)(GENERATE, asked)
        assert (done.code, "certificate" in done.errors) == (14 << 3, True), done.errors
        assert not await buf(f"http://{admin}").listed()
        reflected = buf(f"http://{admin}", *show, "--reflect-header", "*")
        assert "twostroke.v1.Inference" in await reflected.listed()
        await stack.whole()
