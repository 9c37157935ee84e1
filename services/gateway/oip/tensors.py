"""Tensors of the Open Inference Protocol, raw or typed: one element in, an element an answer out."""

import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ....errors import InvalidRequest
from ....oip import grpc_service_pb2 as pb

INPUTS: Mapping[str, str] = MappingProxyType(
    {
        "text_input": "BYTES",
        "stream": "BOOL",
        "sampling_parameters": "BYTES",
        "exclude_input_in_output": "BOOL",
        "return_finish_reason": "BOOL",
        "return_cumulative_logprob": "BOOL",
        "return_logprobs": "BOOL",
        "return_num_input_tokens": "BOOL",
        "return_num_output_tokens": "BOOL",
    }
)
"""What a request may hold, and its datatype."""
OUTPUTS: Mapping[str, str] = MappingProxyType(
    {
        "text_output": "BYTES",
        "finish_reason": "BYTES",
        "cumulative_logprob": "FP32",
        "logprobs": "BYTES",
        "num_input_tokens": "UINT32",
        "num_output_tokens": "UINT32",
    }
)
"""What an answer may hold, and its datatype."""
MAX_NAME = 64  # characters of a client's own name that are repeated to it
_FIELDS = {"BYTES": "bytes_contents", "BOOL": "bool_contents", "FP32": "fp32_contents", "UINT32": "uint_contents"}
_ELEMENTS = {"FP32": "f", "UINT32": "I"}
_LENGTH = 4  # bytes before an element of BYTES, the least significant one first

Tensor = pb.ModelInferRequest.InferInputTensor


def shortened(name: str) -> str:
    """A client's own name, as a refusal repeats it."""
    return name if len(name) <= MAX_NAME else name[:MAX_NAME] + "..."


def shown(name: str) -> str:
    """The same in quotes, without line ends and the like."""
    return repr(shortened(name))


def read_inputs(request: pb.ModelInferRequest) -> dict[str, bytes | bool]:
    """The one element of each input by its name. InvalidRequest for what is unknown, doubled, or of another kind."""
    if len(request.inputs) > len(INPUTS):
        raise InvalidRequest(f"{len(request.inputs)} inputs, at most {len(INPUTS)}", field="inputs")
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequest(
            f"raw_input_contents has {len(raw)} elements for {len(request.inputs)} inputs", field="raw_input_contents"
        )
    values: dict[str, bytes | bool] = {}
    for index, tensor in enumerate(request.inputs):
        _check(tensor)
        if tensor.name in values:
            raise InvalidRequest(f"{tensor.name} is given twice", field=tensor.name)
        values[tensor.name] = _raw(tensor, raw[index]) if raw else _typed(tensor)
    return values


def _check(tensor: Tensor) -> None:
    """Name, datatype, shape, parameters."""
    name = tensor.name
    if name not in INPUTS:
        raise InvalidRequest(f"there is no input {shown(name)} here, but {', '.join(INPUTS)}", field="inputs")
    if tensor.datatype != INPUTS[name]:
        raise InvalidRequest(f"{name} takes {INPUTS[name]}, not {shown(tensor.datatype)}", field=name)
    if tensor.parameters:
        key = min(tensor.parameters)
        what = "shared memory" if key.startswith("shared_memory") else f"the parameter {shown(key)} of an input"
        raise InvalidRequest(f"{name}: {what} is not supported here: send the contents", field=name)
    sizes = tensor.shape
    if 1 <= len(sizes) <= 2 and sizes[0] > 1:
        raise InvalidRequest(
            f"{name} has shape {list(sizes)}, a batch of {sizes[0]}: send each prompt as a request of its own",
            field=name,
        )
    if not 1 <= len(sizes) <= 2 or any(size != 1 for size in sizes):
        told = f"shape {list(sizes)}" if len(sizes) <= 2 else f"{len(sizes)} dimensions"
        raise InvalidRequest(f"{name} has {told}; it takes [1] or [1, 1]", field=name)


def _raw(tensor: Tensor, data: bytes) -> bytes | bool:
    name = tensor.name
    if tensor.HasField("contents"):
        raise InvalidRequest(f"{name} has contents, and raw_input_contents besides: send either", field=name)
    if tensor.datatype == "BOOL":
        if data not in (b"\0", b"\1"):
            raise InvalidRequest(f"{name}: a BOOL is one byte, 0 or 1", field=name)
        return data == b"\1"
    if len(data) < _LENGTH or int.from_bytes(data[:_LENGTH], "little") != len(data) - _LENGTH:
        raise InvalidRequest(
            f"{name}: its {len(data)} bytes are not a length in {_LENGTH} bytes and one text so long", field=name
        )
    return data[_LENGTH:]


def _typed(tensor: Tensor) -> bytes | bool:
    name, wanted = tensor.name, _FIELDS[tensor.datatype]
    for field, _ in tensor.contents.ListFields():
        if field.name != wanted:
            raise InvalidRequest(f"{name}: a tensor of {tensor.datatype} has {wanted}, no {field.name}", field=name)
    elements: Sequence[Any] = getattr(tensor.contents, wanted)
    if len(elements) != 1:
        raise InvalidRequest(f"{name} has {len(elements)} elements, and a shape for one", field=name)
    value: bytes | bool = elements[0]
    return value


def write_output(response: pb.ModelInferResponse, name: str, values: Sequence[Any], *, raw: bool) -> None:
    """Adds a tensor of as many elements as there are values."""
    datatype = OUTPUTS[name]
    tensor = response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    if raw:
        response.raw_output_contents.append(_packed(datatype, values))
    else:
        getattr(tensor.contents, _FIELDS[datatype]).extend(values)


def _packed(datatype: str, values: Sequence[Any]) -> bytes:
    if datatype == "BYTES":
        return b"".join(len(value).to_bytes(_LENGTH, "little") + value for value in values)
    return struct.pack(f"<{len(values)}{_ELEMENTS[datatype]}", *values)
