"""What every kind of reply has in common: its name, its counts of tokens, its chunks."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Protocol

from .... import __version__
from ....engine.request import FinishReason
from ..generation import Finish, Piece
from .generation_fields import StreamOptions
from .logprobs import to_json

DONE = b"data: [DONE]\n\n"
MAX_PLAIN_CHARACTERS = 64 << 20
PADDED = 128  # bytes
_REASONS = {FinishReason.STOP: '"stop"', FinishReason.LENGTH: '"length"'}


class Reply(Protocol):
    """Made of the pieces of all answers, as events or as a whole; one that is asked for events is asked for nothing
    else. `prompt`: index of the prompt that a piece belongs to."""

    def events(self, prompt: int, piece: Piece) -> bytes:
        """Of a piece, perhaps none."""

    def take(self, prompt: int, piece: Piece) -> None:
        """Keeps a piece. InvalidRequest where all would be too large."""

    def whole(self) -> bytes:
        """JSON of all that was kept."""

    def usage_event(self) -> bytes:
        """The last chunk, where it was asked for; else empty."""


@dataclass(slots=True)
class Usage:
    """Token counts; a prompt counts once, however many answers it gets."""

    prompts: dict[int, tuple[int, int]] = field(default_factory=dict)  # tokens, cached ones
    output_tokens: int = 0

    def add(self, prompt: int, finish: Finish, output_tokens: int) -> None:
        """An answer ended."""
        self.prompts[prompt] = (finish.prompt_tokens, finish.cached_tokens)
        self.output_tokens += output_tokens

    def json(self) -> str:
        """`usage`."""
        prompt_tokens = sum(tokens for tokens, _ in self.prompts.values())
        return to_json(
            {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": self.output_tokens,
                "total_tokens": prompt_tokens + self.output_tokens,
                "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self.prompts.values())},
            }
        )


class Frame:
    """What stands around the choices, the same in all chunks of a reply."""

    def __init__(self, name: str, kind: str, model: str, options: StreamOptions) -> None:
        """`name`: `id` of the reply. `kind`: `object`."""
        head = {"id": name, "object": kind, "created": int(time.time()), "model": model}
        self._head = to_json({**head, "system_fingerprint": f"twostroke-{__version__}"})[:-1] + ',"choices":['
        self._options = options

    def event(self, choice: str, prompt_tokens: int, output_tokens: int) -> str:
        """A chunk with one choice. Tokens: of its prompt, and of its answer so far; told where chunks tell them."""
        more = ""
        if self._options.continuous_usage_stats:
            counts = f'"prompt_tokens":{prompt_tokens},"completion_tokens":{output_tokens}'
            more = f',"usage":{{{counts},"total_tokens":{prompt_tokens + output_tokens}}}'
        elif self._options.include_usage:
            more = ',"usage":null'
        if self._options.include_obfuscation:
            more += f',"obfuscation":"{_padding(choice)}"'
        return f"data: {self._head}{choice}]{more}}}\n\n"

    def usage_event(self, usage: Usage) -> str:
        """A chunk of counts alone."""
        return f"data: {self._head}],{_usage(usage)}}}\n\n"

    def whole(self, choices: list[str], usage: Usage, more: str = "") -> bytes:
        """The reply at once. `more`: further members, each after a comma."""
        return f"{self._head}{','.join(choices)}],{_usage(usage)}{more}}}".encode("utf-8", "replace")


def _padding(text: str) -> str:
    """Noise that brings `text` to a multiple of PADDED bytes, so that what passes by tells less of what is said."""
    missing = -len(text.encode("utf-8", "replace")) % PADDED
    return secrets.token_hex(PADDED // 2)[:missing]


def _usage(usage: Usage) -> str:
    return f'"usage":{usage.json()}'


def reason(finish: Finish | None) -> str:
    """`finish_reason`."""
    if finish is None:
        return "null"
    return _REASONS.get(finish.reason) or to_json(finish.reason.name.lower())


def stop_reason(finish: Finish, piece: Piece, stop_token_ids: frozenset[int]) -> str:
    """What ended the answer: the stop string, or the stop token; null for the model's own end and for its length."""
    if finish.stop_string:
        return to_json(finish.stop_string)
    last = piece.token_ids[-1] if piece.token_ids else None
    if finish.reason is FinishReason.STOP and last in stop_token_ids:
        return to_json(last)
    return "null"
