"""Parameters of sampling as Triton's vLLM backend names them, which is mostly as the HTTP door does."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic_core import from_json

from ....errors import InvalidRequest
from ..http.errors import HttpRefusal
from ..http.generation_fields import GenerationFields
from ..http.json_work import too_much_work
from .tensors import shortened, shown

TAKEN = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "logit_bias", "bad_words"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "allowed_token_ids", "banned_token_ids"),
        *("max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        *("n", "logprobs", "structured_outputs", "skip_special_tokens", "truncate_prompt_tokens"),
        *("priority", "cache_salt"),
    )
)
"""Of the fields that doors share: those that mean something here."""
OLDER = "guided_decoding"
MAX_JSON = 1 << 20  # bytes: read on the loop, where others wait meanwhile
_TEXTS = frozenset(("stop", "cache_salt"))  # whose values are texts themselves
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class SamplingFields(GenerationFields):
    """Defaults are the backend's."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationFields.unsupported,
        "best_of": (1,),
        "detokenize": (True,),
        "extra_args": ({},),
        "flat_logprobs": (False,),
        "lora_name": (),
        "output_kind": (),
        "prompt_logprobs": (),
        "skip_reading_prefix_cache": (False,),
    }

    max_tokens: int | None = 16
    logprobs: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "SamplingFields":
        """InvalidRequest that names the first one that is wrong, unknown or not supported."""
        given = _renamed(given)
        for name in given:
            if name not in TAKEN and name not in cls.unsupported:
                raise InvalidRequest(f"there is no parameter {shown(name)} here", field=shortened(name))
        with plain_refusals():
            return cls.read({name: plain(name, value) for name, value in given.items()})


@contextmanager
def plain_refusals() -> Iterator[None]:
    """What the shared fields refuse in HTTP's way comes out as InvalidRequest."""
    try:
        yield
    except HttpRefusal as refusal:
        raise InvalidRequest(refusal.message, field=refusal.field) from None


def _renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """`guided_decoding` is what `structured_outputs` was called, with a `backend` besides."""
    named = dict(given)
    wanted = plain(OLDER, named.pop(OLDER, None))
    if wanted is None:
        return named
    if not isinstance(wanted, dict):
        raise InvalidRequest(f"{OLDER} must be a JSON object", field=OLDER)
    if named.get("structured_outputs") is not None:
        raise InvalidRequest(f"{OLDER} and structured_outputs: send one of them", field=OLDER)
    if wanted.get("backend") not in (None, "auto", "guidance"):
        raise InvalidRequest(f"{OLDER}.backend cannot be chosen here: leave it out", field=f"{OLDER}.backend")
    return named | {"structured_outputs": {name: value for name, value in wanted.items() if name != "backend"}}


def plain(name: str, value: Any) -> Any:
    """A number, a list or an object may come as text, as parameters hold nothing else and Triton's clients send so."""
    if not isinstance(value, str) or name in _TEXTS or len(value) > MAX_JSON:
        return value
    try:
        return _parsed(_PYTHON.get(value, value).encode("utf-8", "replace"), shortened(name))
    except ValueError:
        return value


def _parsed(text: bytes, field: str) -> Any:
    """ValueError where it is no JSON; InvalidRequest where reading it would hold others up."""
    if too_much_work(text):
        raise InvalidRequest(f"{field} has too many values, names or escapes: send less at once", field=field)
    return from_json(text, allow_inf_nan=False)


def read_object(text: bytes) -> dict[str, Any]:
    """The parameters of a JSON object. InvalidRequest."""
    field = "sampling_parameters"
    if len(text) > MAX_JSON:
        raise InvalidRequest(f"{field} has {len(text)} bytes, at most {MAX_JSON}", field=field)
    try:
        given = _parsed(text, field)
    except ValueError as error:
        raise InvalidRequest(f"{field} is no valid JSON: {error}", field=field) from None
    if not isinstance(given, dict):
        raise InvalidRequest(f"{field} must be a JSON object", field=field)
    return given
