"""docs/api.md names every field of every door, and only tests that there are."""

import re
from pathlib import Path

import pytest

from twostroke.oip import grpc_service_pb2 as pb
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

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
SECTIONS = TEXT.split("\n## ")[1:]


def test_every_field_of_the_openai_api() -> None:
    named = set(re.findall(r"`([a-z_]+)`", TEXT))
    for schema in (CompletionFields, ChatFields, StreamOptions, TokenizeFields, DetokenizeFields):
        assert set(schema.model_fields) <= named, schema
        assert set(schema.unsupported) <= named, schema
    assert {kind.code for _, kind in KINDS} - {"wrong_state"} <= named


def test_every_field_of_the_open_inference_protocol() -> None:
    named = set(re.findall(r"`([A-Za-z_]+)`", next(text for text in SECTIONS if text.startswith("Open Inference"))))
    assert {*INPUTS, *OUTPUTS, *TAKEN, *SamplingFields.unsupported, EMPTY_FINAL, FINAL} <= named
    assert {field.name for field in pb.ModelInferRequest.DESCRIPTOR.fields} <= named
    assert {method.name for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods} <= named


def test_every_field_of_the_engine_protocol() -> None:
    named = set(re.findall(r"`([A-Za-z_]+)`", next(text for text in SECTIONS if text.startswith("The vLLM engine"))))
    for message in (vllm_engine_pb2.GenerateRequest, vllm_engine_pb2.SamplingParams):
        assert {field.name for field in message.DESCRIPTOR.fields} <= named, message
    assert {method.name for method in vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].methods} <= named


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.partition("\n")[0])
def test_the_tests_that_it_names(section: str) -> None:
    """Each door's section says where its tests are."""
    folder = re.search(r"[Tt]he tests named here are in `([\w/]+)`", section)
    assert folder is not None
    for file, test in re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", section):
        text = (ROOT / folder[1] / file).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in text, test
    for file in re.findall(r"`(tests/[\w/]+\.py)`", section):
        assert (ROOT / file).is_file(), file


def test_links() -> None:
    for target in re.findall(r"\]\(([\w./-]+)\)", TEXT):
        assert (ROOT / "docs" / target).is_file(), target
