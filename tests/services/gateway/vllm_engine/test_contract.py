"""The engine door's messages are those of the package smg-grpc-proto: names, numbers, kinds and presence."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from twostroke.smg import common_pb2, vllm_engine_pb2

protoc = pytest.importorskip("grpc_tools.protoc")

OPAQUE = {"vllm.grpc.engine.MultimodalInputs", "vllm.grpc.engine.MediaRefs"}
"""Refused whole: nothing in them is read."""
Field = descriptor_pb2.FieldDescriptorProto


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Compiled anew, as two modules of the same messages cannot be imported into one process."""
    found = importlib.util.find_spec("smg_grpc_proto")
    assert found is not None
    assert found.submodule_search_locations is not None
    folder = Path(found.submodule_search_locations[0]) / "proto"
    target = tmp_path_factory.mktemp("theirs") / "set"
    flags = ["protoc", f"-I{folder}", "--include_imports", f"--descriptor_set_out={target}"]
    assert protoc.main([*flags, str(folder / "vllm_engine.proto")]) == 0
    return index(descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file)


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    files = []
    for module in (common_pb2, vllm_engine_pb2):
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        files.append(file)
    return index(files)


def index(files: Any) -> dict[str, Any]:
    """All messages and services by their full names."""
    return {
        f"{file.package}.{each.name}": each
        for file in files
        for each in [*file.message_type, *file.service]
        if file.package.startswith(("vllm.", "smg."))
    }


def facts(message: Any) -> dict[str, tuple[Any, ...]]:
    """Of each field: number, type, label, presence and the oneof that it is in."""
    oneofs = [oneof.name for oneof in message.oneof_decl]
    return {
        field.name: (
            field.number,
            field.type,
            field.type_name,
            field.label,
            field.proto3_optional,
            oneofs[field.oneof_index] if field.HasField("oneof_index") else "",
        )
        for field in message.field
    }


def asked(index: dict[str, Any]) -> Iterator[str]:
    """Full names of messages that callers send, and of those in them."""
    service = index["vllm.grpc.engine.VllmEngine"]
    waiting = [method.input_type.removeprefix(".") for method in service.method]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or name in OPAQUE or name not in index:
            continue
        seen.add(name)
        yield name
        waiting += [f.type_name.removeprefix(".") for f in index[name].field if f.type == Field.TYPE_MESSAGE]


def test_every_field_of_ours_is_theirs(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    messages = {name: each for name, each in ours.items() if isinstance(each, descriptor_pb2.DescriptorProto)}
    assert len(messages) > 40
    for name, message in messages.items():
        if name in OPAQUE:
            assert name in theirs
            assert not message.field
            continue
        there = facts(theirs[name])
        for field, told in facts(message).items():
            assert there.get(field) == told, f"{name}.{field}"
        for nested in message.nested_type:  # of maps
            other = next(each for each in theirs[name].nested_type if each.name == nested.name)
            assert facts(other) == facts(nested), f"{name}.{nested.name}"


def test_every_field_that_callers_may_set_is_read_or_refused(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    names = list(asked(theirs))
    assert "vllm.grpc.engine.SamplingParams" in names
    for name in names:
        assert facts(ours[name]) == facts(theirs[name]), name


def test_what_is_left_out_is_in_answers_only(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    generate = facts(theirs["vllm.grpc.engine.GenerateComplete"]).keys()
    assert generate - facts(ours["vllm.grpc.engine.GenerateComplete"]).keys() == {"media_identity"}
    for name in ("GetModelInfoResponse", "GetServerInfoResponse", "GetLoadsResponse", "SchedulerLoad"):
        assert facts(ours[f"vllm.grpc.engine.{name}"]) == facts(theirs[f"vllm.grpc.engine.{name}"]), name


def test_the_service_has_all_its_methods(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    def methods(index: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
        return {
            method.name: (method.input_type, method.output_type, method.client_streaming, method.server_streaming)
            for method in index["vllm.grpc.engine.VllmEngine"].method
        }

    assert methods(ours) == methods(theirs)
    assert len(methods(ours)) == 12
