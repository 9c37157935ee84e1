"""Messages of the Open Inference Protocol for tests, built and read, and a call of its stream."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from twostroke.oip import grpc_service_pb2 as pb
from twostroke.oip import grpc_service_pb2_grpc as rpc
from twostroke.services.gateway.oip.tensors import INPUTS, OUTPUTS

Shape = Sequence[int]


def infer(
    text: str | None = "hello",
    *,
    raw: bool = True,
    sampling: Mapping[str, Any] | str | None = None,
    parameters: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = (),
    shape: Shape = (1,),
    id: str = "",
    model: str = "",
    version: str = "",
    **flags: bool,
) -> pb.ModelInferRequest:
    """A request; `flags` are inputs of BOOL."""
    request = pb.ModelInferRequest(model_name=model, model_version=version, id=id)
    if text is not None:
        add_input(request, "text_input", text.encode(), raw=raw, shape=shape)
    if sampling is not None:
        told = sampling if isinstance(sampling, str) else json.dumps(sampling)
        add_input(request, "sampling_parameters", told.encode(), raw=raw, shape=shape)
    for name, value in flags.items():
        add_input(request, name, value, raw=raw, shape=shape)
    for name, value in (parameters or {}).items():
        set_parameter(request, name, value)
    for name in outputs:
        request.outputs.add(name=name)
    return request


def add_input(
    request: pb.ModelInferRequest, name: str, value: bytes | bool, *, raw: bool = True, shape: Shape = (1,)
) -> None:
    """Adds a tensor of one element."""
    tensor = request.inputs.add(name=name, datatype=INPUTS.get(name, "BYTES"), shape=shape)
    if raw:
        plain = bytes([value]) if isinstance(value, bool) else struct.pack("<I", len(value)) + value
        request.raw_input_contents.append(plain)
    elif isinstance(value, bool):
        tensor.contents.bool_contents.append(value)
    else:
        tensor.contents.bytes_contents.append(value)


def set_parameter(request: pb.ModelInferRequest, name: str, value: Any) -> None:
    """By the kind of the value, as Triton's clients do."""
    parameter = request.parameters[name]
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    if value is None:
        parameter.SetInParent()
    else:
        setattr(parameter, kinds[type(value)], value)


def read_output(response: pb.ModelInferResponse, name: str) -> list[Any] | None:
    """The elements of a tensor, raw or typed; None where there is no such tensor. Checks datatype and shape."""
    index = next((index for index, tensor in enumerate(response.outputs) if tensor.name == name), None)
    if index is None:
        return None
    tensor = response.outputs[index]
    assert tensor.datatype == OUTPUTS[name]
    if response.raw_output_contents:
        assert len(response.raw_output_contents) == len(response.outputs)
        assert not tensor.HasField("contents")
        values = _unpacked(tensor.datatype, response.raw_output_contents[index])
    else:
        field = {"BYTES": "bytes_contents", "FP32": "fp32_contents", "UINT32": "uint_contents"}[tensor.datatype]
        values = list(getattr(tensor.contents, field))
    assert list(tensor.shape) == [len(values)]
    return [value.decode() if isinstance(value, bytes) else value for value in values]


def _unpacked(datatype: str, data: bytes) -> list[Any]:
    if datatype != "BYTES":
        return list(struct.unpack(f"<{len(data) // 4}{'f' if datatype == 'FP32' else 'I'}", data))
    values = []
    while data:
        length = int.from_bytes(data[:4], "little")
        assert len(data) >= 4 + length
        values.append(data[4 : 4 + length])
        data = data[4 + length :]
    return values


def texts(responses: Sequence[pb.ModelInferResponse]) -> list[str]:
    """The text of each answer."""
    columns = [read_output(response, "text_output") or [] for response in responses]
    return ["".join(parts) for parts in zip(*(column for column in columns if column), strict=True)]


def is_final(response: pb.ModelInferResponse) -> bool:
    return bool(response.parameters["triton_final_response"].bool_param)


class Stream:
    """A call of ModelStreamInfer. Every message is kept under its request's id, errors as text."""

    def __init__(self, channel: grpc.aio.Channel, **options: Any) -> None:
        self.call: Any = rpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(**options)
        self.responses: dict[str, list[pb.ModelInferResponse]] = {}
        self.errors: dict[str, str] = {}
        self.ended: dict[str, asyncio.Event] = {}
        self.order: list[str] = []
        self.changed = asyncio.Event()

    async def send(self, *requests: pb.ModelInferRequest) -> None:
        for request in requests:
            self.ended[request.id] = asyncio.Event()
            await self.call.write(request)

    async def read(self) -> None:
        """To the end of the call."""
        while (message := await self.call.read()) is not grpc.aio.EOF:
            response = message.infer_response
            assert not self.ended[response.id].is_set(), "a message after the last one"
            self.order.append(response.id)
            self.responses.setdefault(response.id, []).append(response)
            if message.error_message:
                self.errors[response.id] = message.error_message
            if is_final(response):
                self.ended[response.id].set()
            self.changed.set()

    async def done(self, *ids: str) -> None:
        async with asyncio.timeout(20):
            for name in ids:
                await self.ended[name].wait()


@asynccontextmanager
async def stream(channel: grpc.aio.Channel, **options: Any) -> AsyncIterator[Stream]:
    """Reads beside the body; closes at its end, and checks that the call ended well."""
    it = Stream(channel, **options)
    reading = asyncio.create_task(it.read())
    try:
        yield it
        await it.call.done_writing()
        async with asyncio.timeout(20):
            await reading
        assert await it.call.code() is grpc.StatusCode.OK, await it.call.details()
    finally:
        it.call.cancel()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def collect(
    channel: grpc.aio.Channel, *requests: pb.ModelInferRequest, **options: Any
) -> dict[str, list[pb.ModelInferResponse]]:
    """Sends all on one stream and closes it; the responses by id."""
    async with stream(channel, **options) as it:
        await it.send(*requests)
    return it.responses
