"""What a request for tools means to this model: the format of its calls, and a constraint where it is held to it."""

import json
from dataclasses import replace
from typing import Any

from ....engine.request import Constraint, ConstraintKind
from ..generation import Sampling
from ..served_model import ServedModel
from ..tools.grammar import write_grammar
from ..tools.wish import ToolWish
from .calls import Tools
from .errors import HttpRefusal

_JSON_KINDS = (ConstraintKind.JSON_OBJECT, ConstraintKind.JSON_SCHEMA)


def plan_tools(wish: ToolWish | None, model: ServedModel) -> Tools | None:
    """None where nothing may be called. HttpRefusal where nobody knows how the model writes calls."""
    if wish is None:
        return None
    if model.tool_format is None:
        raise HttpRefusal(
            f"how {model.name} writes calls of tools is not known: leave tools out, or have the gateway started with "
            "--tool-parser",
            field="tools",
            code="unsupported_parameter",
        )
    return Tools(wish, model.tool_format)


def constrain(sampling: Sampling, tools: Tools, model: ServedModel) -> Sampling:
    """Holds the answer to the calls that were asked for. What else it must be (`response_format`) then holds for
    answers that call nothing."""
    answer = None
    if sampling.constraint is not None and not tools.wish.required:
        if sampling.constraint.kind not in _JSON_KINDS:
            raise HttpRefusal(
                "one that may call tools takes no regex, choice or grammar: send tool_choice 'none', or 'required'",
                field="tool_choice",
            )
        answer = _schema(sampling.constraint.text)
    elif not tools.wish.constrained:
        return sampling
    template = model.tokenizer.template
    source = template.source if template is not None else ""
    grammar = write_grammar(tools.format.name, source, tools.wish, model.special_id, answer=answer)
    return replace(sampling, constraint=Constraint(ConstraintKind.GRAMMAR, grammar))


def _schema(text: str) -> dict[str, Any]:
    """Of a constraint; its own check says what is wrong with it, where it is alone."""
    try:
        schema = json.loads(text or '{"type": "object"}')
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise HttpRefusal("the schema of response_format is no JSON object", field="response_format")
    return schema
