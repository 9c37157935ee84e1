"""A request as it is read: inputs, parameters, outputs, and what the client calls each field."""

import json
from typing import Any

import pytest

from twostroke.engine.request import Constraint, ConstraintKind
from twostroke.errors import InvalidRequest, ModelNotFound
from twostroke.oip import grpc_service_pb2 as pb
from twostroke.services.gateway.generation import TextInput
from twostroke.services.gateway.oip.request import check_version, read_request

from ...oip_client import infer


def refused(request: pb.ModelInferRequest) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequest) as caught:
        read_request(request)
    return caught.value.field, caught.value.message


def test_a_plain_request() -> None:
    read = read_request(infer("é", raw=False))
    assert (read.text, read.stream, read.prepend, read.outputs) == ("é", False, True, ("text_output",))
    assert (read.raw, read.empty_final, read.timeout_s, read.logprobs) == (False, False, None, None)
    made = read.generation(TextInput("é"), None, "")
    assert (made.input, made.timeout_s, made.n, made.stopping.max_tokens) == (TextInput("é"), None, 1, 16)
    assert len(made.request_id) == 16
    assert read_request(infer(id="mine")).generation(TextInput(""), 1.0, "t").request_id == "mine"


@pytest.mark.parametrize(
    ("stream", "exclude", "prepend"),
    [(False, None, True), (False, False, True), (False, True, False), (True, None, False), (True, True, False)],
)
def test_whether_the_prompt_comes_back(stream: bool, exclude: bool | None, prepend: bool) -> None:
    more = {} if exclude is None else {"exclude_input_in_output": exclude}
    assert read_request(infer(stream=stream, **more)).prepend is prepend


def test_no_prompt_comes_back_in_a_stream() -> None:
    field, message = refused(infer(stream=True, exclude_input_in_output=False))
    assert (field, "leave it out" in message) == ("exclude_input_in_output", True)


def test_outputs_are_those_named_or_asked_for() -> None:
    flags = {"return_finish_reason": True, "return_num_output_tokens": True, "return_logprobs": False}
    assert read_request(infer(**flags)).outputs == ("text_output", "finish_reason", "num_output_tokens")
    named = infer(outputs=["num_output_tokens", "text_output", "text_output"], **flags)
    assert read_request(named).outputs == ("text_output", "num_output_tokens")
    assert refused(infer(outputs=["text"]))[0] == "outputs"
    assert refused(infer(outputs=["text_output"] * 7))[0] == "outputs"
    named.outputs[0].parameters["classification"].int64_param = 3
    assert "parameter 'classification'" in refused(named)[1]


def test_likelihoods_are_asked_for_where_they_are_needed() -> None:
    assert read_request(infer(return_cumulative_logprob=True)).logprobs == 0
    assert read_request(infer(return_cumulative_logprob=True, sampling={"logprobs": 3})).logprobs == 3
    assert read_request(infer(return_logprobs=True)).logprobs is None


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("timeout", -1, "microseconds"),
        ("timeout", 1.5, "microseconds"),
        ("timeout", "5", "microseconds"),
        ("timeout", True, "microseconds"),
        ("timeout", 1 << 62, "microseconds"),
        ("sequence_id", 1, "sequences"),
        ("sequence_id", "a", "sequences"),
        ("sequence_start", True, "sequences"),
        ("triton_enable_empty_final_response", 1, "bool_param"),
        ("triton_grpc_error", True, "begin with triton_"),
        ("top_p", None, "has no value"),
        ("headers", "x", "there is no parameter"),
        ("binary_data_output", True, "there is no parameter"),
    ],
)
def test_parameters_of_the_protocol(name: str, value: Any, why: str) -> None:
    field, message = refused(infer(parameters={name: value}))
    assert (field, why in message) == (f"parameters.{name}", True), message


def test_harmless_parameters_of_the_protocol() -> None:
    given = {"sequence_id": 0, "sequence_start": False, "sequence_end": False, "priority": 0, "timeout": 0}
    assert read_request(infer(parameters=given)).timeout_s is None
    assert read_request(infer(parameters={"sequence_id": ""})).timeout_s is None
    request = infer(parameters={"timeout": 1_500_000})
    request.parameters["priority"].uint64_param = 0
    read = read_request(request)
    assert read.timeout_s == 1.5
    assert [read.generation(TextInput(""), left, "").timeout_s for left in (None, 1.0, 2.0)] == [1.5, 1.0, 1.5]


def test_so_many_parameters_and_no_more() -> None:
    assert refused(infer(parameters={f"p{number}": 1 for number in range(65)}))[0] == "parameters"


def test_what_the_client_calls_each_field() -> None:
    read = read_request(infer(sampling={"stop": ["a"]}, parameters={"top_p": 0.5, "stop": "b"}))
    assert read.fields.stop == ["a"]
    names = {
        "input": "text_input",
        "input.text": "text_input",
        "input.token_ids.ids[3]": "text_input",
        "model": "model_name",
        "request_id": "id",
        "sampling.top_p": "parameters.top_p",
        "sampling.top_k": "sampling_parameters.top_k",
        "stopping.strings[0]": "sampling_parameters.stop[0]",
        "stopping.max_tokens": "sampling_parameters.max_tokens",
        "n": "sampling_parameters.n",
    }
    assert {name: read.client_name(name) for name in names} == names
    assert refused(infer(parameters={"top_p": "x"}))[0] == "parameters.top_p"
    assert refused(infer(sampling={"top_p": "x"}, parameters={"top_p": 1.0}))[0] == "sampling_parameters.top_p"


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"structured_outputs": {"regex": "a+"}}, ConstraintKind.REGEX, "a+"),
        ({"structured_outputs": '{"choice": ["a", "b"]}'}, ConstraintKind.CHOICE, '["a", "b"]'),
        ({"guided_decoding": {"json": {"type": "object"}}}, ConstraintKind.JSON_SCHEMA, '{"type":"object"}'),
        ({"guided_decoding": '{"grammar": "root ::= 1", "backend": "auto"}'}, ConstraintKind.GRAMMAR, "root ::= 1"),
    ],
)
def test_constrained_output(given: dict[str, Any], kind: ConstraintKind, text: str) -> None:
    read = read_request(infer(sampling=given))
    made = read.generation(TextInput(""), None, "").sampling.constraint
    assert made == Constraint(kind, text)
    told = f"sampling_parameters.structured_outputs.{made.kind.name.lower().removesuffix('_schema')}"
    assert read.client_name(f"sampling.constraint.{made.kind.name.lower()}") == told
    flat = {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}
    read = read_request(infer(parameters=flat))
    assert read.generation(TextInput(""), None, "").sampling.constraint == made
    assert read.client_name("sampling.constraint") == told.replace("sampling_parameters", "parameters")


@pytest.mark.parametrize(
    ("given", "field", "why"),
    [
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs.grammar", "send one of them"),
        ({"structured_outputs": {}}, "structured_outputs", "takes one of"),
        ({"structured_outputs": {"jsn": 1}}, "structured_outputs.jsn", "there is no field"),
        ({"structured_outputs": "a+"}, "structured_outputs", "valid dictionary"),
        ({"guided_decoding": "a+"}, "guided_decoding", "JSON object"),
        ({"guided_decoding": {"regex": "a", "backend": "outlines"}}, "guided_decoding.backend", "leave it out"),
        ({"guided_decoding": {"regex": "a"}, "structured_outputs": {"regex": "a"}}, "guided_decoding", "one of them"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids as names"),
        ({"seed": -(1 << 70)}, "seed", "64 bits"),
    ],
)
def test_what_shared_fields_refuse_late_comes_as_any_refusal(given: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        read_request(infer(sampling=given)).generation(TextInput(""), None, "")
    assert type(caught.value) is InvalidRequest
    assert (caught.value.field or "").removeprefix("sampling_parameters.") == field


def test_texts_are_utf_8() -> None:
    request = infer("ab")
    request.raw_input_contents[0] = b"\2\0\0\0\xff\xff"
    assert refused(request) == ("text_input", "text_input is no valid UTF-8")


def test_names_and_versions() -> None:
    assert refused(infer(id="x" * 129))[0] == "id"
    assert refused(infer(id="a\nb"))[0] == "id"
    check_version("1", "version")
    with pytest.raises(ModelNotFound, match="no version 'latest' here, but 1") as caught:
        read_request(infer(version="latest"))
    assert caught.value.field == "model_version"
