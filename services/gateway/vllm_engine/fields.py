"""A router's request, field by field: into the gateway's own, or refused by its name."""

import json
from itertools import islice
from typing import Any

from ....engine.check_controls import MAX_LISTED
from ....engine.request import Constraint, ConstraintKind
from ....errors import InvalidRequest
from ....smg import vllm_engine_pb2 as pb
from ..generation import Input, Sampling, Stopping, TextInput, TokenInput
from ..validation import MAX_ANSWERS, MAX_STOP_STRINGS, MAX_STOP_TOKENS
from .names import SAMPLING

MAX_CHOICES = 1 << 16  # texts to choose from: more cannot be as short as a constraint must be
_SEED_BITS = (1 << 64) - 1


def check_supported(request: pb.GenerateRequest) -> None:
    """InvalidRequest with the first field that cannot be honoured."""
    media = "this model takes text"
    transfer = "the gateway moves KV between its workers itself"
    refused: tuple[tuple[str, Any, str], ...] = (
        ("mm_inputs", request.HasField("mm_inputs"), media),
        ("extra_mm_inputs", request.extra_mm_inputs, media),
        ("media_refs", request.HasField("media_refs"), media),
        ("kv_transfer_params", request.HasField("kv_transfer_params"), transfer),
        ("kv_transfer_params_json", request.kv_transfer_params_json, transfer),
        ("data_parallel_rank", request.data_parallel_rank, "the gateway is rank 0, and no other"),
        (
            f"{SAMPLING}.truncate_prompt_tokens",
            request.sampling_params.HasField("truncate_prompt_tokens"),
            "send the tokens that shall run",
        ),
        (
            f"{SAMPLING}.structural_tag",
            request.sampling_params.HasField("structural_tag"),
            "send json_schema, regex, grammar or choice",
        ),
    )
    for name, present, remedy in refused:
        if present:
            raise InvalidRequest(f"{name} is not supported: {remedy}", field=name)


def read_input(request: pb.GenerateRequest) -> Input:
    """InvalidRequest where there is none; nothing else is checked here."""
    match request.WhichOneof("input"):
        case "tokenized":
            return TokenInput(request.tokenized.input_ids)
        case "text":
            return TextInput(request.text)
        case _:
            raise InvalidRequest("the input is missing: set tokenized or text", field="input")


def read_answers(params: pb.SamplingParams) -> int:
    """How many; 0 is 1. InvalidRequest for more than anybody gets: something is made for each."""
    if params.n > MAX_ANSWERS:
        raise InvalidRequest(f"n is {params.n}; it takes 1 to {MAX_ANSWERS}", field=f"{SAMPLING}.n")
    return params.n or 1


def read_sampling(params: pb.SamplingParams) -> Sampling:
    """Absent is what the protocol says. Of lists that are too long only so much is read that it can be told."""
    return Sampling(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k,
        top_p=params.top_p or 1.0,
        seed=params.seed & _SEED_BITS if params.HasField("seed") else None,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(islice(params.logit_bias.items(), MAX_LISTED + 1)),
        constraint=read_constraint(params),
    )


def read_stopping(params: pb.SamplingParams) -> Stopping:
    """Absent `max_tokens` stays absent."""
    return Stopping(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        strings=tuple(islice(params.stop, MAX_STOP_STRINGS + 1)),
        token_ids=tuple(islice(params.stop_token_ids, MAX_STOP_TOKENS + 1)),
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
        include_stop=params.include_stop_str_in_output,
    )


def read_constraint(params: pb.SamplingParams) -> Constraint | None:
    """None where none is set."""
    match params.WhichOneof("constraint"):
        case "json_object":
            if not params.json_object:
                raise InvalidRequest("json_object takes true", field=f"{SAMPLING}.json_object")
            return Constraint(ConstraintKind.JSON_OBJECT)
        case "json_schema":
            return Constraint(ConstraintKind.JSON_SCHEMA, params.json_schema)
        case "regex":
            return Constraint(ConstraintKind.REGEX, params.regex)
        case "grammar":
            return Constraint(ConstraintKind.GRAMMAR, params.grammar)
        case "choice":
            choices = list(islice(params.choice.choices, MAX_CHOICES + 1))
            if len(choices) > MAX_CHOICES:
                raise InvalidRequest(f"more than {MAX_CHOICES} choices", field=f"{SAMPLING}.choice")
            return Constraint(ConstraintKind.CHOICE, json.dumps(choices, ensure_ascii=False))
        case _:
            return None
