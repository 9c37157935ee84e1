"""Replies of `/v1/completions`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ....engine.request import PromptLogprobs
from ..generation import Finish, Piece
from .completion_fields import CompletionFields
from .errors import HttpRefusal
from .logprobs import (
    CompletionLogprobs,
    Offsets,
    TokenNames,
    completion_entry,
    prompt_entries,
    prompt_positions,
    to_json,
)
from .reply import MAX_PLAIN_CHARACTERS, Frame, Usage, reason, stop_reason


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be told of a prompt again: its text where it is echoed, its tokens where they are asked for."""

    text: str = ""
    ids: Sequence[int] = ()


@dataclass(slots=True)
class _Kept:
    """An answer as far as it goes."""

    texts: list[str] = field(default_factory=list)
    logprobs: CompletionLogprobs = field(default_factory=CompletionLogprobs)
    offsets: Offsets = field(default_factory=Offsets)
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    stop_reason: str = "null"
    begun: bool = False


class CompletionReply:
    """See `Reply`. Choices are numbered prompt by prompt."""

    def __init__(
        self, name: str, model: str, fields: CompletionFields, names: TokenNames, prompts: Sequence[Prompt]
    ) -> None:
        options = fields.read_stream_options()
        self._include_usage = options.include_usage
        self._frame = Frame(f"cmpl-{name}", "text_completion", model, options)
        self._fields = fields
        self._stops = frozenset(fields.stop_token_ids)
        self._names = names
        self._prompts = prompts
        self._usage = Usage()
        self._kept = [_Kept() for _ in range(fields.n * len(prompts))]
        self._scores: dict[int, PromptLogprobs] = {}  # by prompt
        self._size = 0

    def events(self, prompt: int, piece: Piece) -> bytes:
        """One chunk a piece; the last one tells why the answer ended."""
        index, kept = self._place(prompt, piece)
        text, told = self._read(prompt, piece, kept)
        logprobs = told.json() if self._fields.logprobs is not None else "null"
        more = self._ids(prompt, list(piece.token_ids), first=not kept.begun) if not self._fields.prompt_only else ""
        idle = not (text or told.tokens or more or piece.finish is not None)
        kept.begun = kept.begun or not idle
        if idle:
            return b""
        if piece.finish is not None:
            more += f',"stop_reason":{self._finish(prompt, piece, piece.finish)}'
        choice = _choice(index, text, logprobs, reason(piece.finish), more)
        made = 0 if self._fields.prompt_only else piece.first_index + len(piece.token_ids)
        return self._frame.event(choice, len(self._prompts[prompt].ids), made).encode("utf-8", "replace")

    def take(self, prompt: int, piece: Piece) -> None:
        """Keeps a piece."""
        _, kept = self._place(prompt, piece)
        if piece.prompt_logprobs is not None:
            self._scores[prompt] = piece.prompt_logprobs
        text, told = self._read(prompt, piece, kept, echo=False)
        kept.texts.append(text)
        kept.logprobs.extend(told)
        self._size += len(text) + told.size()
        if self._size > MAX_PLAIN_CHARACTERS:
            raise HttpRefusal("the answer is too large for one response: ask for a stream", field="stream")
        if self._fields.return_token_ids and not self._fields.prompt_only:
            kept.token_ids += piece.token_ids
        if piece.finish is not None:
            kept.finish = piece.finish
            kept.stop_reason = self._finish(prompt, piece, piece.finish)

    def whole(self) -> bytes:
        """All answers to all prompts."""
        choices = []
        for index, kept in enumerate(self._kept):
            prompt = index // self._fields.n
            text, logprobs = "".join(kept.texts), kept.logprobs
            if self._fields.echo:
                text, logprobs = self._prompts[prompt].text + text, self._echo(prompt, kept.logprobs)
            more = f',"stop_reason":{kept.stop_reason}{self._ids(prompt, kept.token_ids, first=True)}'
            if self._fields.prompt_logprobs is not None:
                more += f',"prompt_logprobs":{prompt_entries(self._scores[prompt], self._names)}'
            told = logprobs.json() if self._fields.logprobs is not None else "null"
            choices.append(_choice(index, text, told, reason(kept.finish), more))
        return self._frame.whole(choices, self._usage)

    def usage_event(self) -> bytes:
        """Counts."""
        return self._frame.usage_event(self._usage).encode() if self._include_usage else b""

    def _place(self, prompt: int, piece: Piece) -> tuple[int, _Kept]:
        index = prompt * self._fields.n + piece.sample
        return index, self._kept[index]

    def _read(self, prompt: int, piece: Piece, kept: _Kept, *, echo: bool = True) -> tuple[str, CompletionLogprobs]:
        """The text and log-probabilities of a piece, with the prompt's in front of an answer's first one."""
        told = CompletionLogprobs()
        text = ""
        if echo and self._fields.echo and not kept.begun:
            text = self._prompts[prompt].text
            if piece.prompt_logprobs is not None and self._fields.logprobs is not None:
                self._add_prompt(told, prompt, piece.prompt_logprobs, kept.offsets)
        if self._fields.prompt_only:
            return text, told
        if self._fields.logprobs is not None:
            for token, entries in zip(piece.token_ids, piece.logprobs, strict=True):
                completion_entry(told, token, entries, self._names, kept.offsets)
        return text + piece.text, told

    def _echo(self, prompt: int, answer: CompletionLogprobs) -> CompletionLogprobs:
        """The prompt's log-probabilities, then the answer's, moved behind the prompt's text."""
        told = CompletionLogprobs()
        if self._fields.logprobs is None:
            return told
        self._add_prompt(told, prompt, self._scores[prompt], Offsets())
        told.extend(answer)
        start = len(self._prompts[prompt].text)
        count = len(answer.text_offset)
        told.text_offset[len(told.text_offset) - count :] = [str(start + int(at)) for at in answer.text_offset]
        return told

    def _add_prompt(self, told: CompletionLogprobs, prompt: int, scores: PromptLogprobs, offsets: Offsets) -> None:
        ids = self._prompts[prompt].ids
        completion_entry(told, ids[0], (), self._names, offsets)
        for token, entries in zip(ids[1:], prompt_positions(scores), strict=True):
            completion_entry(told, token, entries, self._names, offsets)

    def _finish(self, prompt: int, piece: Piece, finish: Finish) -> str:
        """Counts the answer; why it stopped."""
        self._usage.add(prompt, finish, 0 if self._fields.prompt_only else finish.output_tokens)
        return stop_reason(finish, piece, self._stops)

    def _ids(self, prompt: int, ids: list[int], *, first: bool) -> str:
        if not self._fields.return_token_ids:
            return ""
        asked = f',"prompt_token_ids":{to_json(list(self._prompts[prompt].ids))}' if first else ""
        return f'{asked},"token_ids":{to_json(ids)}'


def _choice(index: int, text: str, logprobs: str, finish: str, more: str) -> str:
    return f'{{"index":{index},"text":{to_json(text)},"logprobs":{logprobs},"finish_reason":{finish}{more}}}'
