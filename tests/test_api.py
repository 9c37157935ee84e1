"""docs/api.md names every field of every door, and only tests that there are."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, ServiceDescriptor

from twostroke.oip import grpc_service_pb2
from twostroke.services.gateway.http.chat_fields import ChatFields
from twostroke.services.gateway.http.completion_fields import CompletionFields
from twostroke.services.gateway.http.errors import KINDS
from twostroke.services.gateway.http.generation_fields import StreamOptions
from twostroke.services.gateway.http.tokenize import DetokenizeFields, TokenizeFields
from twostroke.services.gateway.oip.reply import FINAL
from twostroke.services.gateway.oip.request import EMPTY_FINAL
from twostroke.services.gateway.oip.sampling_fields import TAKEN, SamplingFields
from twostroke.services.gateway.oip.tensors import INPUTS, OUTPUTS
from twostroke.smg import vllm_engine_pb2
from twostroke.v1 import inference_pb2

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
SECTIONS = TEXT.split("\n## ")[1:]


REFUSED = {"KvTransferParams", "MultimodalInputs", "MediaRefs"}  # messages of fields that are
UNIMPLEMENTED = {"Embed", "FlushCache", "StartProfile", "StopProfile"}
NATIVE, HTTP, OPEN_INFERENCE, ENGINE = SECTIONS


def rows(section: str) -> Iterator[tuple[list[str], bool]]:
    """The cells of each row of each table, and whether the text before the table names a test for all of them."""
    for part in re.split(r"(?m)^### ", section):
        told, header = False, False
        for line in part.splitlines():
            if line.startswith("|"):
                cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
                if header and not set(line) <= set("|- "):
                    yield cells, told
                header = True
            else:
                header = False
                told = told or bool(re.search(r"`[\w/]*test_\w+\.py", line))


def named(cell: str) -> set[str]:
    return set(re.findall(r"`([A-Za-z_][A-Za-z0-9_]*)`", cell))


def messages(service: ServiceDescriptor) -> dict[str, set[str]]:
    """The fields of all messages that a service takes and gives, by the messages' names."""
    found: dict[str, set[str]] = {}

    def visit(message: Descriptor) -> None:
        if message.name in found or message.name in REFUSED or message.GetOptions().map_entry:
            return
        found[message.name] = {field.name for field in message.fields}
        for field in message.fields:
            if field.message_type is not None:
                visit(field.message_type)

    for method in service.methods:
        if method.name not in UNIMPLEMENTED:
            visit(method.input_type)
            visit(method.output_type)
    return {name: fields for name, fields in found.items() if fields}


@pytest.mark.parametrize(
    ("section", "service"),
    [
        (NATIVE, inference_pb2.DESCRIPTOR.services_by_name["Inference"]),
        (OPEN_INFERENCE, grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]),
        (ENGINE, vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]),
    ],
    ids=("native", "open inference", "engine"),
)
def test_every_field_of_every_message(section: str, service: ServiceDescriptor) -> None:
    """Of a message of several words' name its rows say the fields; rows without one say those of a request."""
    by_message: dict[str, set[str]] = {}
    requests: set[str] = set()
    for cells, _ in rows(section):
        owners = {name for name in named(cells[0]) if not name.islower()}
        for name in owners:
            by_message.setdefault(name, set()).update(named(cells[1]))
        if not owners:
            requests |= named(" ".join(cells))
    assert {method.name for method in service.methods} <= named(section)
    for name, fields in messages(service).items():
        assert name in by_message, f"no row for {name}"
        known = by_message[name] | (
            requests if name in ("GenerateRequest", "TokenizedInput", "SamplingParams") else set()
        )
        assert fields <= known, f"{name}: {sorted(fields - known)}"


def test_every_field_of_the_openai_api() -> None:
    taken = {name for cells, _ in rows(HTTP) for name in named(cells[0])}
    refused = {name for cells, _ in rows(HTTP) for name in named(" ".join(cells[1:]))}
    for schema in (CompletionFields, ChatFields):
        assert set(schema.model_fields) <= taken, schema
        assert set(schema.unsupported) <= refused | taken, schema
    for schema in (StreamOptions, TokenizeFields, DetokenizeFields):
        assert set(schema.model_fields) | set(schema.unsupported) <= named(HTTP), schema
    assert {kind.code for _, kind in KINDS} - {"wrong_state"} <= named(HTTP)


def test_every_input_and_parameter_of_the_open_inference_protocol() -> None:
    known = {name for cells, _ in rows(OPEN_INFERENCE) for name in named(" ".join(cells))}
    assert {*INPUTS, *OUTPUTS, *TAKEN, *SamplingFields.unsupported} <= known
    assert {EMPTY_FINAL, FINAL} <= named(OPEN_INFERENCE)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.partition("\n")[0])
def test_every_row_names_a_test(section: str) -> None:
    for cells, told in rows(section):
        assert told or re.search(r"`[\w/]*test_\w+\.py", cells[-1]), f"no test for {cells[0]}"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.partition("\n")[0])
def test_the_tests_that_it_names(section: str) -> None:
    """Each door's section says where its tests are."""
    folder = re.search(r"[Tt]he tests named here are in `([\w/]+)`", section)
    assert folder is not None
    found = re.findall(r"`((?:[\w/]+/)?test_\w+\.py)(?:::(test_\w+))?`", section)
    assert found
    for file, test in found:
        path = ROOT / (file if "/" in file else f"{folder[1]}/{file}")
        assert path.is_file(), file
        assert not test or re.search(rf"^(?:async )?def {test}\(", path.read_text(encoding="utf-8"), re.M), (file, test)


def test_links() -> None:
    for target in re.findall(r"\]\(([\w./-]+)\)", TEXT):
        assert (ROOT / "docs" / target).is_file(), target
