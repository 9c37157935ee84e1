"""Refuses requests that are wrong in themselves, with the path of the field; costs little, even for hostile ones."""

import re

from ...errors import ContextExceeded, InvalidRequest, PermissionDenied
from ..security.limits import LEAST_URGENT, MOST_URGENT
from ..security.tenant import Tenant
from .generation import ChatInput, GenerationRequest, Input, Stopping, TextInput, TokenInput
from .sampling_checks import check_sampling
from .served_model import ServedModel, characters

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MAX_REQUEST_ID = 128
MAX_MESSAGES = 4096
MAX_ROLE = 64
MAX_ANSWERS = 16
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def validate(request: GenerationRequest, model: ServedModel) -> Input:
    """Returns the input, which is there. ModelNotFound, or InvalidRequest with the field's path."""
    model.check_name(request.model)
    check_request_id(request.request_id)
    check_priority(request.priority, request.tenant)
    if not 1 <= request.n <= MAX_ANSWERS:
        raise InvalidRequest(f"n is {request.n}; it takes 1 to {MAX_ANSWERS}", field="n")
    check_sampling(request.sampling, model.vocabulary_size)
    check_stopping(request.stopping, model)
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs is {request.logprobs}; it takes 0 to {MAX_LOGPROBS}", field="logprobs")
    top = request.prompt_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequest(f"prompt_logprobs is {top}; it takes 0 to {MAX_LOGPROBS}", field="prompt_logprobs")
    return check_input(request.input, model)


def check_input(source: Input | None, model: ServedModel) -> Input:
    """Returns the input, which is there and not hopelessly long; its tokens are counted later."""
    if isinstance(source, TokenInput):
        check_token_input(source, model)
    elif isinstance(source, ChatInput):
        check_chat(source, model)
    elif source is None:
        raise InvalidRequest("input is missing: set text, token_ids or chat", field="input")
    elif not source.text:
        raise InvalidRequest("the prompt is empty", field="input.text")
    if characters(source) > model.max_characters:
        field = "input.text" if isinstance(source, TextInput) else "input.chat"
        raise ContextExceeded(
            f"the prompt has {characters(source)} characters, more than {model.max_input} tokens can hold", field=field
        )
    return source


def check_token_input(source: TokenInput, model: ServedModel) -> None:
    """At least one id, none outside the vocabulary."""
    if not source.ids:
        raise InvalidRequest("the prompt is empty", field="input.token_ids.ids")
    check_length(len(source.ids), model, field="input.token_ids.ids")
    if max(source.ids) >= model.vocabulary_size or min(source.ids) < 0:
        index = next(i for i, token in enumerate(source.ids) if not 0 <= token < model.vocabulary_size)
        raise InvalidRequest(
            f"token id {source.ids[index]} is outside the vocabulary of {model.vocabulary_size}",
            field=f"input.token_ids.ids[{index}]",
        )


def check_chat(source: ChatInput, model: ServedModel) -> None:
    """At least one turn, each with a role."""
    if not model.tokenizer.has_chat_template:
        raise InvalidRequest(f"{model.name} has no chat template", field="input.chat")
    check_messages(len(source.messages))
    for index, turn in enumerate(source.messages):
        if not 1 <= len(turn.role) <= MAX_ROLE:
            raise InvalidRequest(f"a role takes 1 to {MAX_ROLE} characters", field=f"input.chat.messages[{index}].role")


def check_messages(count: int) -> None:
    """Doors ask before they make Python objects of them: a message may hold millions of empty turns."""
    if not 1 <= count <= MAX_MESSAGES:
        raise InvalidRequest(f"a chat has {count} messages; it takes 1 to {MAX_MESSAGES}", field="input.chat.messages")


def check_stopping(stopping: Stopping, model: ServedModel) -> None:
    """Few and short stop strings, known stop tokens, at least one token to generate."""
    if stopping.max_tokens is not None and not 1 <= stopping.max_tokens <= model.max_output:
        raise InvalidRequest(
            f"max_tokens is {stopping.max_tokens}; it takes 1 to {model.max_output}", field="stopping.max_tokens"
        )
    most = model.max_output if stopping.max_tokens is None else stopping.max_tokens
    if not 0 <= stopping.min_tokens <= most:
        raise InvalidRequest(
            f"min_tokens is {stopping.min_tokens}; it takes 0 to {most}, the most tokens", field="stopping.min_tokens"
        )
    if len(stopping.strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"{len(stopping.strings)} stop strings, at most {MAX_STOP_STRINGS}", field="stopping.strings"
        )
    for index, string in enumerate(stopping.strings):
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"a stop string has {len(string)} characters; it takes 1 to {MAX_STOP_CHARACTERS}",
                field=f"stopping.strings[{index}]",
            )
    if len(stopping.token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"{len(stopping.token_ids)} stop tokens, at most {MAX_STOP_TOKENS}", field="stopping.token_ids"
        )
    for index, token in enumerate(stopping.token_ids):
        if not 0 <= token < model.vocabulary_size:
            raise InvalidRequest(
                f"token id {token} is outside the vocabulary of {model.vocabulary_size}",
                field=f"stopping.token_ids[{index}]",
            )


def check_request_id(request_id: str) -> None:
    """It goes into logs and headers: short, printable ASCII."""
    if len(request_id) > MAX_REQUEST_ID:
        raise InvalidRequest(
            f"request_id has {len(request_id)} characters, at most {MAX_REQUEST_ID}", field="request_id"
        )
    if not (request_id.isascii() and request_id.isprintable()):
        raise InvalidRequest("request_id takes printable ASCII characters only", field="request_id")


def check_priority(priority: int, tenant: Tenant) -> None:
    """InvalidRequest out of its range, PermissionDenied where it is more urgent than the tenant may be."""
    if not MOST_URGENT <= priority <= LEAST_URGENT:
        raise InvalidRequest(f"priority is {priority}; it takes {MOST_URGENT} to {LEAST_URGENT}", field="priority")
    most = tenant.limits.priority
    if most is not None and priority < most:
        raise PermissionDenied(
            f"priority is {priority}; tenant {tenant.name!r} may ask for {most} or more", field="priority"
        )


def check_length(prompt_tokens: int, model: ServedModel, field: str = "input") -> None:
    """The prompt and one more token fit."""
    if prompt_tokens > model.max_input:
        raise ContextExceeded(f"the prompt has {prompt_tokens} tokens, at most {model.max_input}", field=field)
    if prompt_tokens >= model.context_length:
        raise ContextExceeded(
            f"the prompt has {prompt_tokens} tokens and leaves no room in the context of {model.context_length}",
            field=field,
        )


def check_width(answers: int, most: int) -> None:
    """`most`: sequences that the widest worker runs at once; all answers to a prompt begin together."""
    if answers > most:
        raise InvalidRequest(f"n is {answers}; the workers run {most} sequences at once", field="n")


def output_limit(prompt_tokens: int, max_tokens: int | None, model: ServedModel, most: int) -> int:
    """The number of tokens to generate at most.

    `most`: prompt and output together that the largest worker takes. A limit that was asked for must fit; where none
    was, it is what fits.
    """
    room = min(model.context_length, most) - prompt_tokens
    if room < 1:
        raise ContextExceeded(
            f"the prompt has {prompt_tokens} tokens; the workers take {most} with the output", field="input"
        )
    if max_tokens is None:
        return min(room, model.max_output)
    if max_tokens > room:
        raise ContextExceeded(
            f"max_tokens is {max_tokens}; after a prompt of {prompt_tokens} tokens {room} fit",
            field="stopping.max_tokens",
        )
    return max_tokens


def clean_traceparent(value: str) -> str:
    """A W3C trace context as it came, or empty where it is none."""
    if not _TRACEPARENT.fullmatch(value) or value.startswith("ff"):
        return ""
    _, trace, span, _ = value.split("-")
    return value if int(trace, 16) and int(span, 16) else ""
