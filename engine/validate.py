"""What a request must satisfy before the engine takes it."""

from math import isfinite

from ..errors import InvalidRequest
from .check_controls import check_controls
from .config import EngineOptions
from .request import Request, SamplingParams, Work

MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 1024
MAX_SAMPLES = 16


def check_request(
    request: Request, options: EngineOptions, *, context_length: int, vocab_size: int, usable_pages: int
) -> None:
    """Raises InvalidRequest, with the field, for one that is malformed or can never fit into `usable_pages`."""
    check_params(request.params, vocab_size)
    _check_tokens(request, options, context_length, vocab_size)
    _check_samples(request, options)
    limit = token_limit(request, context_length)
    known = len(request.prompt_ids) + len(request.output_ids)
    positions = known if request.work is Work.PREFILL else max(known, limit - 1)
    needed, known_pages = (-(-count // options.page_size) for count in (positions, known))
    parting = known_pages if positions == known else _pages_at_parting(request, known, options.page_size)
    if needed <= usable_pages < parting:
        raise InvalidRequest(f"needs {parting} KV pages, this engine has {usable_pages}", field="samples")
    if needed > usable_pages:
        field = "prompt_ids" if known_pages > usable_pages else "max_tokens"
        raise InvalidRequest(f"needs {needed} KV pages, this engine has {usable_pages}", field=field)


def nothing_left(index: int) -> InvalidRequest:
    """Why a sequence fails whose parameters leave no token to draw at this output index."""
    return InvalidRequest(
        f"allowed and banned tokens, bad words, min_tokens and the constraint leave no token at output index {index}",
        field="sampling",
    )


def cannot_go_on(index: int, reason: str) -> InvalidRequest:
    """Why a sequence fails whose constraint cannot be followed any more from this output index on."""
    return InvalidRequest(f"{reason} (at output index {index})", field="constraint")


def token_limit(request: Request, context_length: int) -> int:
    """The most tokens, prompt and output together, that the sequence may have."""
    return min(len(request.prompt_ids) + request.params.max_tokens, context_length)


def _pages_at_parting(request: Request, known: int, page_size: int) -> int:
    """Pages for the prompt and one more token of each sample; full pages of the prompt are shared."""
    first = -(-(known + 1) // page_size)
    return first + (request.samples - 1) * (first - known // page_size)


def _check_samples(request: Request, options: EngineOptions) -> None:
    """All samples that run here must fit into the batch at once."""
    samples = request.samples
    if not 1 <= samples <= MAX_SAMPLES:
        raise InvalidRequest(f"samples must be in 1 .. {MAX_SAMPLES}, not {samples}", field="samples")
    if samples > 1 and request.output_ids:
        raise InvalidRequest("several samples begin at the prompt's end: output_ids must be empty", field="samples")
    most = options.max_batch
    if samples > most and request.work is not Work.PREFILL:
        raise InvalidRequest(f"{samples} samples are more than run here at once ({most})", field="samples")


def _check_tokens(request: Request, options: EngineOptions, context_length: int, vocab_size: int) -> None:
    prompt, output, params = request.prompt_ids, request.output_ids, request.params
    if not prompt:
        raise InvalidRequest("the prompt is empty", field="prompt_ids")
    if options.max_input and len(prompt) > options.max_input:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens, at most {options.max_input} are taken", field="prompt_ids"
        )
    if len(prompt) + len(output) >= context_length:
        have = len(prompt) + len(output)
        raise InvalidRequest(f"{have} tokens leave no room in the context of {context_length}", field="prompt_ids")
    if options.max_output and params.max_tokens > options.max_output:
        raise InvalidRequest(
            f"max_tokens is {params.max_tokens}, at most {options.max_output} are made", field="max_tokens"
        )
    if len(output) >= params.max_tokens:
        raise InvalidRequest(f"{len(output)} output tokens of {params.max_tokens} exist already", field="output_ids")
    for field, ids in (("prompt_ids", prompt), ("output_ids", output)):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InvalidRequest(f"token ids must be in 0 .. {vocab_size - 1}", field=field)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest, with the field, for parameters out of range."""
    if not (isfinite(params.temperature) and params.temperature >= 0):
        raise InvalidRequest(f"temperature must be a finite number >= 0, not {params.temperature}", field="temperature")
    if not 0 < params.top_p <= 1:
        raise InvalidRequest(f"top_p must be in (0, 1], not {params.top_p}", field="top_p")
    if params.top_k < 0:
        raise InvalidRequest(f"top_k must be >= 0, not {params.top_k}", field="top_k")
    if not 0 <= params.seed < 1 << 64:
        raise InvalidRequest("seed must be an unsigned 64-bit number", field="seed")
    if params.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be >= 1, not {params.max_tokens}", field="max_tokens")
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs must be in 0 .. {MAX_LOGPROBS}, not {params.logprobs}", field="logprobs")
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"at most {MAX_STOP_TOKENS} stop tokens are taken", field="stop_token_ids")
    if any(not 0 <= token < vocab_size for token in params.stop_token_ids):
        raise InvalidRequest(f"stop token ids must be in 0 .. {vocab_size - 1}", field="stop_token_ids")
    check_controls(params, vocab_size)
