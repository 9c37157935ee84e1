"""Tensors, raw and typed: what is taken and what is refused by name; what is written."""

import struct
from collections.abc import Callable
from typing import Any

import pytest

from twostroke.errors import InvalidRequest
from twostroke.oip import grpc_service_pb2 as pb
from twostroke.services.gateway.oip.tensors import INPUTS, OUTPUTS, read_inputs, shown, write_output

from ...oip_client import add_input, infer, read_output


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_each_input_is_read(raw: bool, shape: tuple[int, ...]) -> None:
    request = pb.ModelInferRequest()
    wanted: dict[str, bytes | bool] = {}
    for number, (name, datatype) in enumerate(INPUTS.items()):
        wanted[name] = b"\xff\0 " * number if datatype == "BYTES" else number % 2 == 0
        add_input(request, name, wanted[name], raw=raw, shape=shape)
    assert read_inputs(request) == wanted
    assert read_inputs(pb.ModelInferRequest()) == {}


Change = Callable[[pb.ModelInferRequest], Any]
TYPED: dict[str, tuple[Change, str, str]] = {
    "datatype": (lambda r: setattr(r.inputs[0], "datatype", "FP32"), "text_input", "takes BYTES, not 'FP32'"),
    "no datatype": (lambda r: setattr(r.inputs[0], "datatype", ""), "text_input", "takes BYTES, not ''"),
    "batch": (lambda r: r.inputs[0].shape.__setitem__(0, 3), "text_input", "a batch of 3: send each prompt"),
    "batch of pairs": (lambda r: r.inputs[0].shape.extend([2]), "text_input", r"shape \[1, 2\]; it takes \[1\]"),
    "no shape": (lambda r: r.inputs[0].ClearField("shape"), "text_input", r"shape \[\]; it takes \[1\] or"),
    "none": (lambda r: r.inputs[0].shape.__setitem__(0, 0), "text_input", r"shape \[0\]"),
    "negative": (lambda r: r.inputs[0].shape.__setitem__(0, -1), "text_input", r"shape \[-1\]"),
    "deep": (lambda r: r.inputs[0].shape.extend([1] * 100), "text_input", "has 101 dimensions"),
    "name": (lambda r: setattr(r.inputs[0], "name", "prompt"), "inputs", "no input 'prompt' here, but text_input"),
    "long name": (lambda r: setattr(r.inputs[0], "name", "x" * 500), "inputs", "x{64}\\.\\.\\.' here"),
    "shared memory": (
        lambda r: setattr(r.inputs[0].parameters["shared_memory_region"], "string_param", "x"),
        "text_input",
        "shared memory is not supported",
    ),
    "parameter": (
        lambda r: setattr(r.inputs[0].parameters["fast"], "bool_param", True), "text_input", "parameter 'fast'"
    ),
    "many": (lambda r: [r.inputs.add() for _ in range(20)], "inputs", "21 inputs, at most 9"),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPED)
@pytest.mark.parametrize("raw", [True, False])
def test_what_does_not_fit_is_refused_by_name(name: str, raw: bool) -> None:
    change, field, text = TYPED[name]
    request = infer(raw=raw)
    change(request)
    if raw and len(request.inputs) > 1:
        request.raw_input_contents.extend([b""] * 20)
    with pytest.raises(InvalidRequest, match=text) as caught:
        read_inputs(request)
    assert caught.value.field == field


CONTENTS: dict[str, tuple[Change, str, str]] = {
    "absent": (lambda r: r.inputs[0].ClearField("contents"), "text_input", "has 0 elements"),
    "two": (lambda r: r.inputs[0].contents.bytes_contents.append(b""), "text_input", "has 2 elements"),
    "of another kind": (
        lambda r: r.inputs[0].contents.fp32_contents.append(1), "text_input", "has bytes_contents, no fp32_contents"
    ),
    "both": (lambda r: r.raw_input_contents.append(struct.pack("<I", 0)), "text_input", "raw_input_contents besides"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTENTS)
def test_typed_contents_are_of_one_kind_and_of_one_element(name: str) -> None:
    change, field, text = CONTENTS[name]
    request = infer(raw=False)
    change(request)
    with pytest.raises(InvalidRequest, match=text) as caught:
        read_inputs(request)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "data",
    [b"", b"\0\0\0", struct.pack("<I", 3) + b"ab", struct.pack("<I", 1) + b"ab", struct.pack(">I", 2) + b"ab",
     (struct.pack("<I", 1) + b"a") * 2, b"\xff" * 4],
)  # fmt: skip
def test_raw_texts_come_after_their_length(data: bytes) -> None:
    request = infer("ab")
    request.raw_input_contents[0] = data
    with pytest.raises(InvalidRequest, match=f"its {len(data)} bytes are not a length") as caught:
        read_inputs(request)
    assert caught.value.field == "text_input"


@pytest.mark.parametrize("data", [b"", b"\2", b"\0\0", b"true"])
def test_a_raw_truth_is_one_byte(data: bytes) -> None:
    request = infer(stream=True)
    request.raw_input_contents[1] = data
    with pytest.raises(InvalidRequest, match="one byte, 0 or 1") as caught:
        read_inputs(request)
    assert caught.value.field == "stream"


def test_there_is_a_raw_element_for_each_input() -> None:
    request = infer(stream=True)
    del request.raw_input_contents[0]
    with pytest.raises(InvalidRequest, match="1 elements for 2 inputs") as caught:
        read_inputs(request)
    assert caught.value.field == "raw_input_contents"


@pytest.mark.parametrize("raw", [True, False])
def test_each_output_is_written(raw: bool) -> None:
    response = pb.ModelInferResponse()
    values: dict[str, list[Any]] = {}
    for name, datatype in OUTPUTS.items():
        values[name] = ["", "é\0"] if datatype == "BYTES" else [0.5, -8.0] if datatype == "FP32" else [7, 1 << 31]
        plain = [value.encode() if isinstance(value, str) else value for value in values[name]]
        write_output(response, name, plain, raw=raw)
    assert {name: read_output(response, name) for name in OUTPUTS} == values
    if raw:
        assert response.raw_output_contents[0] == b"\0\0\0\0\3\0\0\0\xc3\xa9\0"


def test_names_are_shown_in_quotes_and_not_for_ever() -> None:
    assert shown("a\nb") == r"'a\nb'"
    assert shown("x" * 100) == "'" + "x" * 64 + "...'"
