"""Triton's own Python client, unmodified, against real processes: 1P1D, real text, streams, cancels, errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostroke.oip import grpc_service_pb2
from twostroke.services.gateway.gateway import Gateway, load_model
from twostroke.services.security.api_keys import new_key
from twostroke.services.settings import GatewaySettings
from twostroke.v1 import inference_pb2 as pb

from ..e2e.harness import Launch, Stack
from ..services.certificates import Authority
from ..services.cluster import until
from ..services.stand_in_worker import StandIn
from .conftest import run

FLAGS = ("--model", "smollm2-135m", "--threads", "1", "--kv-memory", "256MiB")
EXACT = ("--dtype", "float32")  # so that a text is the same beside any neighbours
PROMPTS = {"a": "The lighthouse keeper wrote in his journal", "b": "Once upon a time", "c": "Photosynthesis is"}
PROGRAM = Path(__file__).with_name("triton_calls.py")


class Triton:
    """The client's own process, one for each scenario."""

    def __init__(self, python: Path, address: str) -> None:
        self._python, self._address = python, address

    async def __call__(self, scenario: str, *more: str) -> Any:
        done = await run(self._python, PROGRAM, self._address, scenario, *more)
        assert done.code == 0, done.errors
        return json.loads(done.output)


async def native(stack: Stack, prompt: str, tokens: int) -> str:
    """What the native door answers to the same."""
    request = pb.GenerateRequest(
        input=pb.Input(text=prompt), sampling=pb.Sampling(temperature=0), stopping=pb.Stopping(max_tokens=tokens)
    )
    answer = await stack.client.generate(request)
    assert answer.finish.prefill_worker == "prefill-0"
    assert answer.finish.decode_worker == "decode-0"
    return answer.text


async def test_messages_are_those_that_the_client_knows(environment: Callable[[str], Path]) -> None:
    theirs = await Triton(environment("tritonclient") / "bin" / "python", "127.0.0.1:1")("descriptors")
    ours = grpc_service_pb2.DESCRIPTOR

    def fields(message: Any) -> Any:
        own: dict[str, Any] = {
            field.name: [field.number, field.type, field.is_repeated, getattr(field.message_type, "full_name", None)]
            for field in message.fields
        }
        return own | {nested.name: fields(nested) for nested in message.nested_types}

    [service] = ours.services_by_name.values()
    assert service.full_name == theirs["service"]
    assert len(service.methods) == 7
    for method in service.methods:
        told = [method.input_type.full_name, method.output_type.full_name, method.client_streaming]
        assert told == theirs["calls"][method.name]
    for name, message in ours.message_types_by_name.items():
        assert fields(message) == theirs["messages"][name], name


async def test_with_certificates_and_keys(tiny_dir: Path, tmp_path: Path, environment: Callable[[str], Path]) -> None:
    python = environment("tritonclient") / "bin" / "python"
    ours = Authority(tmp_path, "ours")
    pair = ours.issue("localhost")
    key, kept = new_key("acme")
    (tmp_path / "keys").write_text(kept.line() + "\n")
    worker = StandIn("both", "w0", model=tiny_dir.name)
    settings = GatewaySettings(
        model=str(tiny_dir),
        listen="localhost:0",
        workers=[await worker.start()],
        tls_cert=pair.cert,
        tls_key=pair.key,
        api_keys=tmp_path / "keys",
    )
    gateway = Gateway(settings, load_model(settings))
    try:
        triton = Triton(python, await gateway.start())
        await until(lambda: gateway.fleet.can_decode)
        seen = await triton("secured", str(ours.path), key)
    finally:
        await gateway.stop()
        await worker.stop()
    assert seen["one"] == "hello" + seen["stream"] != "hello"
    assert seen["keyless"][0] == "StatusCode.UNAUTHENTICATED"
    assert "no credentials" in seen["keyless"][1]


async def test_the_client_against_real_processes(
    launch: Launch, smollm2_dir: Path, environment: Callable[[str], Path]
) -> None:
    python = environment("tritonclient") / "bin" / "python"
    async with launch(*FLAGS, *EXACT) as stack:
        triton = Triton(python, stack.address)
        wanted = {name: await native(stack, prompt, 20) for name, prompt in PROMPTS.items()}
        about(await triton("about"))
        unary(await triton("unary"), wanted)
        streams(await triton("streams"), wanted)
        assert await triton("sample") == wanted
        await stack.whole()
        errors(await triton("errors"))
        assert await triton("cancels") == {
            "pieces": 6, "stream": "StatusCode.CANCELLED", "one": "StatusCode.CANCELLED",
        }  # fmt: skip
        await stack.whole()


def about(seen: Any) -> None:
    assert (seen["live"], seen["ready"], seen["model"]) == (True, True, [True, True, False])
    assert seen["server"]["name"] == "twostroke"
    assert seen["inputs"]["text_input"] == "BYTES"
    assert seen["inputs"]["stream"] == "BOOL"
    assert seen["outputs"]["text_output"] == "BYTES"
    assert seen["unknown"][0] == "StatusCode.NOT_FOUND"


def unary(seen: Any, wanted: dict[str, str]) -> None:
    text, reason, likelihood, tokens = seen["outputs"]
    assert (seen["id"], text, reason, tokens) == ("one", wanted["a"], "length", 20)
    assert -100 < likelihood < 0
    assert seen["with_prompt"] == seen["later"] == PROMPTS["a"] + wanted["a"]
    assert seen["choice"] in ("crimson", "turquoise")
    assert len(set(seen["several"])) == 2
    assert seen["named"] == ["num_output_tokens"]


def streams(seen: Any, wanted: dict[str, str]) -> None:
    for name in PROMPTS:
        assert "".join(seen["texts"][name]) == wanted[name]
        assert len(seen["texts"][name]) > 10  # tokens come one by one
    assert "".join(seen["texts"]["again"]) == wanted["b"]
    assert seen["texts"]["whole"] == [wanted["b"]]
    assert seen["empty"] == ["again"]
    assert len(seen["errors"]) == 2
    assert any("there is no input 'prompt' here" in error for error in seen["errors"])
    assert any("top_p is 7" in error for error in seen["errors"])


def errors(seen: Any) -> None:
    statuses = {name: status.removeprefix("StatusCode.") for name, (status, _) in seen.items()}
    invalid = dict.fromkeys(("name", "datatype", "batch", "key", "value", "length"), "INVALID_ARGUMENT")
    assert statuses == invalid | {
        "model": "NOT_FOUND",
        "stream": "UNIMPLEMENTED",
        "deadline": "DEADLINE_EXCEEDED",
        "timeout": "DEADLINE_EXCEEDED",
    }
    for name, words in (
        ("name", "no input 'prompt'"),
        ("datatype", "text_input takes BYTES, not 'FP32'"),
        ("batch", "text_input has shape [2], a batch of 2"),
        ("model", "'gpt-5' is not served here"),
        ("key", "no parameter 'temprature'"),
        ("value", "top_p is 7"),
        ("stream", "ModelStreamInfer"),
        ("length", "the prompt has"),
    ):
        assert words in seen[name][1]
