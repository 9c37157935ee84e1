"""docs/api.md names every field of every door, and only tests that there are."""

import re
from pathlib import Path

from twostroke.services.gateway.http.chat_fields import ChatFields
from twostroke.services.gateway.http.completion_fields import CompletionFields
from twostroke.services.gateway.http.errors import KINDS
from twostroke.services.gateway.http.generation_fields import StreamOptions
from twostroke.services.gateway.http.tokenize import DetokenizeFields, TokenizeFields

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
HTTP_TESTS = ROOT / "tests" / "services" / "gateway" / "http"


def test_every_field_of_the_openai_api() -> None:
    named = set(re.findall(r"`([a-z_]+)`", TEXT))
    for schema in (CompletionFields, ChatFields, StreamOptions, TokenizeFields, DetokenizeFields):
        assert set(schema.model_fields) <= named, schema
        assert set(schema.unsupported) <= named, schema
    assert {kind.code for _, kind in KINDS} - {"wrong_state"} <= named


def test_the_tests_that_it_names() -> None:
    for file, test in re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", TEXT):
        text = (HTTP_TESTS / file).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in text, test


def test_links() -> None:
    for target in re.findall(r"\]\(([\w./-]+)\)", TEXT):
        assert (ROOT / "docs" / target).is_file(), target
