"""A request of this door: read from its message, and as the gateway wants it."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....errors import InvalidRequest, ModelNotFound
from ....oip import grpc_service_pb2 as pb
from ..generation import GenerationRequest, Input
from ..http.names import openai_name
from ..validation import check_request_id
from .sampling_fields import OLDER, SamplingFields, plain_refusals, read_object
from .tensors import OUTPUTS, read_inputs, shortened, shown

VERSION = "1"
"""The one version of the one model."""
MAX_PARAMETERS = 64
EMPTY_FINAL = "triton_enable_empty_final_response"
_ASKED_BY = {f"return_{name}": name for name in OUTPUTS if name != "text_output"}
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "sequence_id": (0, ""),
    "sequence_start": (False,),
    "sequence_end": (False,),
}
_LARGEST_TIMEOUT_US = 86_400 * 10**6


@dataclass(frozen=True, slots=True)
class InferRequest:
    """Read, and right in itself as far as this door can tell."""

    model: str
    id: str  # the caller's, perhaps empty
    request_id: str  # the same, or drawn: for logs
    text: str
    stream: bool
    prepend: bool  # the prompt comes back in front of its answers
    outputs: tuple[str, ...]  # names of tensors
    raw: bool  # tensors came raw, and go so
    empty_final: bool  # an empty response marks the end
    timeout_s: float | None
    fields: SamplingFields
    sources: Mapping[str, str]  # where each parameter was given

    @property
    def logprobs(self) -> int | None:
        """So many most likely tokens beside each: what was asked for, and what the answer is made of."""
        if self.fields.logprobs is None and "cumulative_logprob" in self.outputs:
            return 0
        return self.fields.logprobs

    @property
    def counted(self) -> bool:
        """Whether the prompt's tokens must be known before it runs."""
        return "num_input_tokens" in self.outputs or self.fields.truncate_prompt_tokens is not None

    def truncated(self, ids: Sequence[int], most: int) -> list[int]:
        """Its last tokens, as many as are wanted; `most`: as many as -1 means. InvalidRequest."""
        with plain_refusals():
            return self.fields.truncated(ids, most)

    def generation(self, source: Input, timeout_s: float | None, traceparent: str) -> GenerationRequest:
        """`timeout_s`: left until the deadline of the call. InvalidRequest."""
        limits = [limit for limit in (timeout_s, self.timeout_s) if limit is not None]
        with plain_refusals():
            sampling = self.fields.sampling()
        return GenerationRequest(
            input=source,
            model=self.model,
            sampling=sampling,
            stopping=self.fields.stopping(self.fields.max_tokens),
            logprobs=self.logprobs,
            n=self.fields.n,
            skip_special_tokens=self.fields.skip_special_tokens,
            request_id=self.request_id,
            timeout_s=min(limits, default=None),
            traceparent=traceparent,
            priority=self.fields.priority,
            cache_salt=self.fields.cache_salt.encode(),
        )

    def client_name(self, field: str) -> str:
        """What this request calls a field that the gateway names."""
        if field.startswith("input"):
            return "text_input"
        if field in ("model", "request_id"):
            return {"model": "model_name", "request_id": "id"}[field]
        return _placed(openai_name(field, renamed=self.fields.constraint_names()), self.sources)


def read_request(message: pb.ModelInferRequest) -> InferRequest:
    """InvalidRequest with the field by its name in the message; ModelNotFound for another version."""
    check_id(message.id)
    check_version(message.model_version, "model_version")
    inputs = read_inputs(message)
    if "text_input" not in inputs:
        raise InvalidRequest("the input text_input is missing", field="text_input")
    stream = bool(inputs.get("stream", False))
    exclude = bool(inputs.get("exclude_input_in_output", stream))
    if stream and not exclude:
        raise InvalidRequest(
            "exclude_input_in_output must be true in a stream: leave it out", field="exclude_input_in_output"
        )
    given, reserved = _parameters(message)
    sources = dict.fromkeys(given, "parameters")
    if "sampling_parameters" in inputs:
        told = read_object(bytes(inputs["sampling_parameters"]))
        given |= told
        sources |= dict.fromkeys(told, "sampling_parameters")
    if OLDER in sources:
        sources["structured_outputs"] = sources[OLDER]
    return InferRequest(
        model=message.model_name,
        id=message.id,
        request_id=message.id or secrets.token_hex(8),
        text=_text(bytes(inputs["text_input"])),
        stream=stream,
        prepend=not exclude,
        outputs=_outputs(message, inputs),
        raw=bool(message.raw_input_contents),
        empty_final=_flag(reserved, EMPTY_FINAL),
        timeout_s=_timeout(reserved),
        fields=_fields(given, sources),
        sources=sources,
    )


def check_id(name: str) -> None:
    """It goes into logs and headers, and back to the client. InvalidRequest."""
    try:
        check_request_id(name)
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace("request_id", "id", 1), field="id") from None


def check_version(version: str, field: str) -> None:
    """ModelNotFound."""
    if version not in ("", VERSION):
        raise ModelNotFound(f"there is no version {shown(version)} here, but {VERSION}", field=field)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("text_input is no valid UTF-8", field="text_input") from None


def _outputs(message: pb.ModelInferRequest, inputs: Mapping[str, bytes | bool]) -> tuple[str, ...]:
    """Those that the request names, else the text and what was asked for by inputs; in the order of their table."""
    if len(message.outputs) > len(OUTPUTS):
        raise InvalidRequest(f"{len(message.outputs)} outputs, at most {len(OUTPUTS)}", field="outputs")
    for output in message.outputs:
        if output.name not in OUTPUTS:
            raise InvalidRequest(
                f"there is no output {shown(output.name)} here, but {', '.join(OUTPUTS)}", field="outputs"
            )
        if output.parameters:
            key = shown(min(output.parameters))
            raise InvalidRequest(f"{output.name}: the parameter {key} of an output is not supported", field="outputs")
    wanted = {output.name for output in message.outputs}
    if not wanted:
        wanted = {"text_output", *(name for flag, name in _ASKED_BY.items() if inputs.get(flag))}
    return tuple(name for name in OUTPUTS if name in wanted)


def _parameters(message: pb.ModelInferRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of sampling, and those of the protocol."""
    if len(message.parameters) > MAX_PARAMETERS:
        raise InvalidRequest(f"{len(message.parameters)} parameters, at most {MAX_PARAMETERS}", field="parameters")
    given: dict[str, Any] = {}
    reserved: dict[str, Any] = {}
    for name, parameter in message.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequest(f"the parameter {shown(name)} has no value", field=_placed(name))
        value = getattr(parameter, kind)
        if name in (EMPTY_FINAL, "timeout"):
            reserved[name] = value
        elif name.startswith("triton_"):
            raise InvalidRequest(f"of parameters that begin with triton_ there is {EMPTY_FINAL}", field=_placed(name))
        elif name not in _HARMLESS:
            given[name] = value
        elif value not in _HARMLESS[name]:
            raise InvalidRequest(f"{name}: sequences of requests are not supported here", field=_placed(name))
    return given, reserved


def _flag(reserved: Mapping[str, Any], name: str) -> bool:
    value = reserved.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} takes a bool_param", field=_placed(name))
    return value


def _timeout(reserved: Mapping[str, Any]) -> float | None:
    """Seconds; None where there is none, which 0 says too."""
    value = reserved.get("timeout", 0)
    if type(value) is not int or not 0 <= value <= _LARGEST_TIMEOUT_US:
        raise InvalidRequest(
            f"timeout takes a whole number of microseconds, 0 to {_LARGEST_TIMEOUT_US}", field="parameters.timeout"
        )
    return value / 1e6 if value else None


def _fields(given: Mapping[str, Any], sources: Mapping[str, str]) -> SamplingFields:
    try:
        return SamplingFields.of(given)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, field=_placed(error.field or "", sources)) from None


def _placed(name: str, sources: Mapping[str, str] | None = None) -> str:
    """`parameters.top_p`, or `sampling_parameters.stop[3]` where it was given there, or not at all."""
    if sources is None:
        return f"parameters.{shortened(name)}"
    head = re.split(r"[.\[]", name, maxsplit=1)[0]
    return f"{sources.get(name, sources.get(head, 'sampling_parameters'))}.{name}"
