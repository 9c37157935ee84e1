"""What an output must be, in the words of OpenAI's API and of other servers."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field
from pydantic_core import to_json

from ....engine.request import Constraint, ConstraintKind
from .errors import HttpRefusal
from .fields import Fields, Many

Named = tuple[Constraint, str]  # and what the client calls it


class ConstraintFields(Fields):
    """At most one of them constrains."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | bool | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Many[list[str]] | None = None
    guided_grammar: str | None = None

    def constraint(self) -> Constraint | None:
        """HttpRefusal where a field is wrong, or there are several."""
        named = self._named()
        return named[0] if named is not None else None

    def constraint_names(self) -> Mapping[str, str]:
        """What this client calls the gateway's own field; see `openai_name`."""
        named = self._named()
        if named is None:
            return {}
        constraint, name = named
        return {f"sampling.constraint.{constraint.kind.name.lower()}": name, "sampling.constraint": name}

    def _named(self) -> Named | None:
        found = [*self._response_format(), *self._structured_outputs(), *self._guided()]
        if len(found) > 1:
            raise HttpRefusal(f"{found[0][1]} and {found[1][1]}: send one of them", field=found[1][1])
        return found[0] if found else None

    def _response_format(self) -> Iterator[Named]:
        if self.response_format is None:
            return
        kind = self.response_format.get("type")
        if kind == "json_schema":
            form = _JsonSchemaFormat.read(self.response_format, "response_format.")
            schema = _JsonSchema.read(form.json_schema, "response_format.json_schema.").schema_
            yield _of_schema(schema), "response_format.json_schema.schema"
        elif kind in ("text", "json_object"):
            _Format.read(self.response_format, "response_format.")
            if kind == "json_object":
                yield Constraint(ConstraintKind.JSON_OBJECT), "response_format"
        else:
            raise HttpRefusal(
                "response_format.type takes text, json_object or json_schema", field="response_format.type"
            )

    def _structured_outputs(self) -> Iterator[Named]:
        if self.structured_outputs is None:
            return
        path = "structured_outputs"
        wanted = _StructuredOutputs.read(self.structured_outputs, path + ".")
        if wanted.json_object is False and wanted.model_fields_set == {"json_object"}:
            return
        found = list(_of_kinds(wanted.json_, wanted.regex, wanted.choice, wanted.grammar, path + "."))
        if wanted.json_object:
            found.append((Constraint(ConstraintKind.JSON_OBJECT), path + ".json_object"))
        if not found:
            raise HttpRefusal(f"{path} takes one of json, regex, choice, grammar, json_object", field=path)
        yield from found

    def _guided(self) -> Iterator[Named]:
        return _of_kinds(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar, "guided_")


class _Format(Fields):
    """`response_format` without a schema."""

    type: str


class _JsonSchemaFormat(_Format):
    """`response_format` with one."""

    json_schema: dict[str, Any]


class _JsonSchema(Fields):
    """A schema and its name. It is kept whether or not it is `strict`."""

    name: str = Field("", max_length=64)
    description: str = ""
    schema_: bool | dict[str, Any] = Field(alias="schema")
    strict: bool = False


class _StructuredOutputs(Fields):
    """`structured_outputs`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (False,),
        "disable_fallback": (False, True),
        "structural_tag": (),
        "whitespace_pattern": (),
    }
    json_: str | bool | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Many[list[str]] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def _of_kinds(
    schema: str | bool | dict[str, Any] | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    prefix: str,
) -> Iterator[Named]:
    if schema is not None:
        yield _of_schema(schema), prefix + "json"
    if regex is not None:
        yield Constraint(ConstraintKind.REGEX, regex), prefix + "regex"
    if choice is not None:
        yield Constraint(ConstraintKind.CHOICE, json.dumps(choice)), prefix + "choice"
    if grammar is not None:
        yield Constraint(ConstraintKind.GRAMMAR, grammar), prefix + "grammar"


def _of_schema(schema: str | bool | dict[str, Any]) -> Constraint:
    """A text is JSON already."""
    text = schema if isinstance(schema, str) else to_json(schema).decode()
    return Constraint(ConstraintKind.JSON_SCHEMA, text)
