"""What a router calls the fields that the gateway names in its own words."""

from collections.abc import Iterator
from contextlib import contextmanager

from ....errors import TwostrokeError

SAMPLING = "sampling_params"
_PREFIXES = {
    "sampling.constraint": f"{SAMPLING}.constraint",
    "stopping.strings": f"{SAMPLING}.stop",
    "stopping.token_ids": f"{SAMPLING}.stop_token_ids",
    "stopping.include_stop": f"{SAMPLING}.include_stop_str_in_output",
    "sampling.": f"{SAMPLING}.",
    "stopping.": f"{SAMPLING}.",
    "input.token_ids.ids": "tokenized.input_ids",
    "input.text": "text",
}
_OF_SAMPLING = ("n", "logprobs", "prompt_logprobs")


def router_name(field: str) -> str:
    """`sampling.top_p` is sampling_params.top_p, `input.token_ids.ids[3]` tokenized.input_ids[3]."""
    for prefix, name in _PREFIXES.items():
        if field.startswith(prefix):
            return name + field[len(prefix) :]
    return f"{SAMPLING}.{field}" if field in _OF_SAMPLING else field


@contextmanager
def renaming(*, tokenized: bool = False) -> Iterator[None]:
    """Errors of the body name fields as the router does. `tokenized`: what is wrong with the prompt is wrong with its
    tokens."""
    try:
        yield
    except TwostrokeError as error:
        if error.field is not None:
            error.field = "tokenized.input_ids" if tokenized and error.field == "input" else router_name(error.field)
        raise
