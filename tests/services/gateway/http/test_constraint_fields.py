"""What an output must be, as OpenAI's clients and those of other servers say it; on both endpoints."""

import json
from pathlib import Path
from typing import Any

import pytest

from twostroke.engine.request import Constraint, ConstraintKind
from twostroke.services.gateway.http.chat_fields import ChatFields
from twostroke.services.gateway.http.completion_fields import CompletionFields
from twostroke.services.gateway.http.errors import HttpRefusal
from twostroke.v1 import worker_pb2 as pb

from ...http_client import USER, served
from .test_chat import PATH, workers

K = ConstraintKind
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["é"]}}}
TEXT = json.dumps(SCHEMA, ensure_ascii=False, separators=(",", ":"))


def read(**fields: Any) -> tuple[Constraint | None, str]:
    """The constraint, and what the client calls it."""
    both = [
        CompletionFields.read({"prompt": "x", **fields}),
        ChatFields.read({"messages": [], **fields}),
    ]
    assert both[0].sampling().constraint == both[1].sampling().constraint == both[0].constraint()
    return both[0].constraint(), both[0].constraint_names().get("sampling.constraint", "")


@pytest.mark.parametrize(
    ("fields", "constraint", "name"),
    [
        ({}, None, ""),
        ({"response_format": None}, None, ""),
        ({"response_format": {"type": "text"}}, None, ""),
        ({"structured_outputs": None, "guided_json": None}, None, ""),
        ({"structured_outputs": {"json_object": False}}, None, ""),
        ({"response_format": {"type": "json_object"}}, Constraint(K.JSON_OBJECT), "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            Constraint(K.JSON_SCHEMA, TEXT),
            "response_format.json_schema.schema",
        ),
        ({"guided_json": SCHEMA}, Constraint(K.JSON_SCHEMA, TEXT), "guided_json"),
        ({"guided_json": TEXT}, Constraint(K.JSON_SCHEMA, TEXT), "guided_json"),
        ({"guided_regex": "a+"}, Constraint(K.REGEX, "a+"), "guided_regex"),
        ({"guided_choice": ["a", "b"]}, Constraint(K.CHOICE, '["a", "b"]'), "guided_choice"),
        ({"guided_grammar": "start: /a/"}, Constraint(K.GRAMMAR, "start: /a/"), "guided_grammar"),
        ({"guided_regex": "a", "guided_decoding_backend": "guidance"}, Constraint(K.REGEX, "a"), "guided_regex"),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint(K.JSON_SCHEMA, TEXT), "structured_outputs.json"),
        ({"structured_outputs": {"json": True}}, Constraint(K.JSON_SCHEMA, "true"), "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}}, Constraint(K.REGEX, "a"), "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, Constraint(K.CHOICE, '["a"]'), "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "g"}}, Constraint(K.GRAMMAR, "g"), "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, Constraint(K.JSON_OBJECT), "structured_outputs.json_object"),
        (
            {"structured_outputs": {"regex": "a", "json": None, "disable_any_whitespace": False}},
            Constraint(K.REGEX, "a"),
            "structured_outputs.regex",
        ),
    ],
    ids=str,
)
def test_each_way_to_say_it(fields: dict[str, Any], constraint: Constraint | None, name: str) -> None:
    assert read(**fields) == (constraint, name)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema.bool",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "mode": 1}}},
            "response_format.json_schema.mode",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_regex": "a", "guided_grammar": "start: /a/"}, "guided_grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(HttpRefusal) as caught:
        CompletionFields.read({"prompt": "x", **fields}).sampling()
    assert (caught.value.field or "").startswith(name)


async def test_constraints_reach_the_workers_and_bad_ones_are_named_as_the_client_did(tiny_llama_dir: Path) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    async with served(tiny_llama_dir, *workers()) as it:
        assert (await it.post(PATH, {"messages": USER, "response_format": form})).status_code == 200
        for worker in it.it.workers:
            (submit,) = worker.submits
            assert submit.params.constraint == pb.OutputConstraint(kind=pb.CONSTRAINT_KIND_JSON_SCHEMA, text=TEXT)
        bad = {"type": "array", "uniqueItems": True}
        for fields, param in (
            ({"response_format": {**form, "json_schema": {"schema": bad}}}, "response_format.json_schema.schema"),
            ({"structured_outputs": {"json": bad}}, "structured_outputs.json"),
            ({"guided_json": "{"}, "guided_json"),
            ({"guided_regex": "("}, "guided_regex"),
            ({"guided_choice": []}, "guided_choice"),
            ({"guided_grammar": "start: x"}, "guided_grammar"),
        ):
            status, error = await it.refused(PATH, {"messages": USER, **fields})
            assert (status, error["param"], error["code"]) == (400, param, "invalid_value")
        assert [len(worker.submits) for worker in it.it.workers] == [1, 1]
