"""What a program with Triton's own client does; runs in the environment of that client, which knows nothing of ours.

python triton_calls.py ADDRESS SCENARIO [AUTHORITY KEY]: prints what it saw as JSON.
"""

import asyncio
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

MODEL = "smollm2-135m"
PROMPTS = {"a": "The lighthouse keeper wrote in his journal", "b": "Once upon a time", "c": "Photosynthesis is"}
GREEDY = {"temperature": 0, "max_tokens": 20}
ENDLESS = {"max_tokens": 4000, "ignore_eos": True}


def text(name: str, *values: str, shape: Any = None, kind: Any = triton) -> Any:
    """A tensor of texts."""
    tensor = kind.InferInput(name, shape or [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode() for value in values], dtype=np.object_).reshape(tensor.shape()))
    return tensor


def truth(name: str, value: bool = True, kind: Any = triton) -> Any:
    """A tensor of one BOOL."""
    tensor = kind.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value], dtype=bool))
    return tensor


def inputs(prompt: str, *more: Any, sampling: Any = GREEDY) -> list[Any]:
    """Of a request."""
    return [text("text_input", prompt), text("sampling_parameters", json.dumps(sampling)), *more]


def told(result: Any, name: str = "text_output") -> Any:
    """The one element of an output."""
    value = result.as_numpy(name)[0]
    return value.decode() if isinstance(value, bytes) else value.item()


def refusal(call: Any) -> list[str]:
    """Status and text of the exception that the client raises."""
    try:
        call()
    except InferenceServerException as error:
        return [str(error.status()), str(error.message())]
    raise AssertionError("nothing was refused")


def about(client: Any, _: str) -> Any:
    """Health and metadata."""
    metadata = client.get_model_metadata(MODEL, as_json=True)
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model": [client.is_model_ready(MODEL), client.is_model_ready(MODEL, "1"), client.is_model_ready("gpt-5")],
        "server": client.get_server_metadata(as_json=True),
        "inputs": {tensor["name"]: tensor["datatype"] for tensor in metadata["inputs"]},
        "outputs": {tensor["name"]: tensor["datatype"] for tensor in metadata["outputs"]},
        "unknown": refusal(lambda: client.get_model_metadata("gpt-5")),
    }


def unary(client: Any, _: str) -> Any:
    """One response; what was asked for beside the text; parameters of the request in place of the tensor's."""
    flags = [truth(f"return_{name}") for name in ("finish_reason", "cumulative_logprob", "num_output_tokens")]
    result = client.infer(MODEL, inputs(PROMPTS["a"], truth("exclude_input_in_output"), *flags), request_id="one")
    names = ("text_output", "finish_reason", "cumulative_logprob", "num_output_tokens")
    plain = client.infer(MODEL, [text("text_input", PROMPTS["a"], shape=[1, 1])], parameters=GREEDY)
    several = client.infer(MODEL, inputs("Once", sampling={"n": 2, "seed": 3, "max_tokens": 8}))
    waiting: queue.Queue[Any] = queue.Queue()
    client.async_infer(MODEL, inputs(PROMPTS["a"]), callback=lambda result, error: waiting.put((result, error)))
    later, error = waiting.get(timeout=60)
    assert error is None, error
    choice = {**GREEDY, "guided_decoding": json.dumps({"choice": ["crimson", "turquoise"]})}
    constrained = inputs("My favourite colour is", truth("exclude_input_in_output"), sampling=choice)
    return {
        "choice": told(client.infer(MODEL, constrained)),
        "id": result.get_response().id,
        "outputs": [told(result, name) for name in names],
        "with_prompt": told(plain),
        "later": told(later),
        "several": [value.decode() for value in several.as_numpy("text_output")],
        "named": [
            tensor.name
            for tensor in client.infer(
                MODEL, inputs("Once"), outputs=[triton.InferRequestedOutput("num_output_tokens")]
            ).get_response().outputs
        ],
    }  # fmt: skip


def errors(client: Any, _: str) -> Any:
    """Each as this client shows it."""
    wrong = triton.InferInput("text_input", [1], "FP32")
    wrong.set_data_from_numpy(np.array([1], dtype=np.float32))
    cases = {
        "name": lambda: client.infer(MODEL, [text("prompt", "x")]),
        "datatype": lambda: client.infer(MODEL, [wrong]),
        "batch": lambda: client.infer(MODEL, [text("text_input", "x", "y")]),
        "model": lambda: client.infer("gpt-5", inputs("x")),
        "key": lambda: client.infer(MODEL, inputs("x", sampling={"temprature": 1})),
        "value": lambda: client.infer(MODEL, inputs("x"), parameters={"top_p": 7.0}),
        "stream": lambda: client.infer(MODEL, inputs("x", truth("stream"))),
        "length": lambda: client.infer(MODEL, inputs("word " * 20_000)),
        "deadline": lambda: client.infer(MODEL, inputs("x", sampling=ENDLESS), client_timeout=0.3),
        "timeout": lambda: client.infer(MODEL, inputs("x", sampling=ENDLESS), timeout=200_000),
    }
    return {name: refusal(call) for name, call in cases.items()}


class Heard:
    """What the callback of a stream was told, until each request has its last response."""

    def __init__(self) -> None:
        self.queue: queue.Queue[Any] = queue.Queue()
        self.texts: dict[str, list[str]] = {}
        self.empty: list[str] = []
        self.errors: list[str] = []

    def __call__(self, result: Any, error: Any) -> None:
        self.queue.put((result, error))

    def listen(self, ends: int) -> None:
        """Until so many requests have ended, well or not."""
        while ends:
            result, error = self.queue.get(timeout=60)
            if error is not None:
                self.errors.append(str(error.message()))
                ends -= 1
                continue
            response = result.get_response()
            if not response.outputs:
                self.empty.append(response.id)
            else:
                self.texts.setdefault(response.id, []).append(told(result))
            ends -= response.parameters["triton_final_response"].bool_param


def streams(client: Any, _: str) -> Any:
    """Several requests on one stream, errors among them; one that asks for the empty response at its end."""
    heard = Heard()
    client.start_stream(callback=heard)
    for name, prompt in PROMPTS.items():
        client.async_stream_infer(MODEL, inputs(prompt, truth("stream")), request_id=name)
    client.async_stream_infer(MODEL, [text("prompt", "x")], request_id="bad name")
    client.async_stream_infer(MODEL, inputs("x", truth("stream"), sampling={"top_p": 7}), request_id="bad value")
    heard.listen(5)
    client.async_stream_infer(
        MODEL, inputs(PROMPTS["b"], truth("stream")), request_id="again", enable_empty_final_response=True
    )
    client.async_stream_infer(MODEL, inputs(PROMPTS["b"], truth("exclude_input_in_output")), request_id="whole")
    heard.listen(2)
    client.stop_stream()
    return {"texts": heard.texts, "errors": heard.errors, "empty": heard.empty}


def cancels(client: Any, _: str) -> Any:
    """A stream that is given up, and a response that nobody waits for."""
    heard = Heard()
    client.start_stream(callback=heard)
    for name in "xyz":
        client.async_stream_infer(MODEL, inputs("Once", truth("stream"), sampling=ENDLESS), request_id=name)
    pieces = [heard.queue.get(timeout=60) for _ in range(6)]
    client.stop_stream(cancel_requests=True)
    rest = []
    while not heard.queue.empty():
        rest.append(heard.queue.get())
    context = client.async_infer(MODEL, inputs("Once", sampling=ENDLESS), callback=heard)
    context.cancel()
    _, error = heard.queue.get(timeout=60)
    return {
        "pieces": sum(error is None for _, error in pieces),
        "stream": str(rest[-1][1].status()) if rest else "",
        "one": str(error.status()),
    }


async def sample(_: Any, address: str) -> Any:
    """As the sample of Triton's vLLM backend does it: asyncio, and every parameter a text."""
    given = {"temperature": "0", "top_p": "0.95", "max_tokens": "20"}

    async def requests() -> Any:
        for name, prompt in PROMPTS.items():
            yield {
                "model_name": MODEL,
                "inputs": [
                    text("text_input", prompt, kind=triton_aio),
                    truth("stream", kind=triton_aio),
                    text("sampling_parameters", json.dumps(given), kind=triton_aio),
                ],
                "outputs": [triton_aio.InferRequestedOutput("text_output")],
                "request_id": name,
                "parameters": given,
            }

    texts: dict[str, str] = dict.fromkeys(PROMPTS, "")
    async with triton_aio.InferenceServerClient(address) as client:
        async for result, error in client.stream_infer(requests(), stream_timeout=100):
            assert error is None, error
            texts[result.get_response().id] += told(result)
    return texts


def descriptors(_: Any, __: str) -> Any:
    """The messages and calls that this client knows, by name."""

    def fields(message: Any) -> Any:
        own = {
            field.name: [field.number, field.type, field.is_repeated, getattr(field.message_type, "full_name", None)]
            for field in message.fields
        }
        return own | {nested.name: fields(nested) for nested in message.nested_types}

    [service] = service_pb2.DESCRIPTOR.services_by_name.values()
    calls = {
        method.name: [method.input_type.full_name, method.output_type.full_name, method.client_streaming]
        for method in service.methods
    }
    messages = {name: fields(message) for name, message in service_pb2.DESCRIPTOR.message_types_by_name.items()}
    return {"service": service.full_name, "calls": calls, "messages": messages}


def secured(address: str, authority: str, key: str) -> Any:
    """With certificates, and a key in the headers: a response, a stream, and what comes without the key."""
    with triton.InferenceServerClient(address, ssl=True, root_certificates=authority) as client:
        headers = {"authorization": f"Bearer {key}"}
        heard = Heard()
        client.start_stream(callback=heard, headers=headers)
        client.async_stream_infer("", [text("text_input", "hello"), truth("stream")], request_id="a")
        heard.listen(1)
        client.stop_stream()
        return {
            "one": told(client.infer("", [text("text_input", "hello")], headers=headers)),
            "stream": "".join(heard.texts["a"]),
            "keyless": refusal(lambda: client.infer("", [text("text_input", "hello")])),
        }


def main(address: str, scenario: str, *more: str) -> None:
    """Runs it."""
    if more:
        print(json.dumps(secured(address, *more)))
        return
    found = globals()[scenario]
    with triton.InferenceServerClient(address) as client:
        seen = found(client, address)
        if asyncio.iscoroutine(seen):
            seen = asyncio.run(seen)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
