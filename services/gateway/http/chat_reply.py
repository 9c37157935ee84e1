"""Replies of `/v1/chat/completions`."""

from dataclasses import dataclass, field

from ....engine.request import FinishReason, PromptLogprobs
from ..generation import Finish, Piece
from .calls import CallReader, Tools
from .chat_fields import ChatFields
from .errors import HttpRefusal
from .logprobs import TokenNames, chat_entry, prompt_entries, to_json
from .reply import MAX_PLAIN_CHARACTERS, Frame, Usage, reason, stop_reason


@dataclass(slots=True)
class _Kept:
    """An answer as far as it goes."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    stop_reason: str = "null"
    calls: CallReader | None = None  # where tools may be called


class ChatReply:
    """See `Reply`. A chat is one prompt."""

    def __init__(
        self,
        name: str,
        model: str,
        fields: ChatFields,
        names: TokenNames,
        prompt_ids: list[int],
        tools: Tools | None = None,
    ) -> None:
        """`prompt_ids`: where they are to be told. `tools`: that may be called."""
        kind = "chat.completion.chunk" if fields.stream else "chat.completion"
        options = fields.read_stream_options()
        self._include_usage = options.include_usage
        self._frame = Frame(f"chatcmpl-{name}", kind, model, options)
        self._fields = fields
        self._stops = frozenset(fields.stop_token_ids)
        self._names = names
        self._prompt_ids = prompt_ids
        self._usage = Usage()
        self._kept = [_Kept(calls=tools.reader() if tools is not None else None) for _ in range(fields.n)]
        self._greeted = [False] * fields.n
        self._scores: PromptLogprobs | None = None
        self._size = 0

    def events(self, prompt: int, piece: Piece) -> bytes:
        """The first chunk of an answer tells the role, the last one why it ended."""
        answer, calls = piece.sample, self._kept[piece.sample].calls
        chunks = []
        if not self._greeted[answer]:
            self._greeted[answer] = True
            content = '""' if calls is None else "null"
            chunks.append(
                self._chunk(piece, f'{{"role":"assistant","content":{content}}}', "null", "null", self._asked())
            )
        logprobs = self._logprobs(piece)
        ids = f',"token_ids":{to_json(piece.token_ids)}' if self._fields.return_token_ids else ""
        for delta in self._deltas(piece, calls, told=logprobs != "null" or (bool(ids) and bool(piece.token_ids))):
            chunks.append(self._chunk(piece, delta, logprobs, "null", ids))
            logprobs, ids = "null", ""  # once
        if piece.finish is not None:
            self._usage.add(prompt, piece.finish, piece.finish.output_tokens)
            stop = f',"stop_reason":{stop_reason(piece.finish, piece, self._stops)}'
            chunks.append(self._chunk(piece, "{}", "null", _reason(piece.finish, calls), stop))
        return "".join(chunks).encode("utf-8", "replace")

    @staticmethod
    def _deltas(piece: Piece, calls: CallReader | None, *, told: bool) -> list[str]:
        """At least one where something else is `told` with it."""
        if calls is not None:
            return calls.deltas(piece.text, last=piece.finish is not None) or (["{}"] if told else [])
        return [f'{{"content":{to_json(piece.text)}}}'] if piece.text or told else []

    def take(self, prompt: int, piece: Piece) -> None:
        """Keeps a piece."""
        kept = self._kept[piece.sample]
        if kept.calls is not None:
            kept.calls.keep(piece.text, last=piece.finish is not None)
        else:
            kept.texts.append(piece.text)
        entries = [chat_entry(entry, self._names) for entry in piece.logprobs if entry]
        kept.logprobs += entries
        self._size += len(piece.text) + sum(map(len, entries))
        if self._fields.return_token_ids:
            kept.token_ids += piece.token_ids
        if piece.prompt_logprobs is not None:
            self._scores = piece.prompt_logprobs
        if self._size > MAX_PLAIN_CHARACTERS:
            raise HttpRefusal("the answer is too large for one response: ask for a stream", field="stream")
        if piece.finish is not None:
            kept.finish = piece.finish
            kept.stop_reason = stop_reason(piece.finish, piece, self._stops)
            self._usage.add(prompt, piece.finish, piece.finish.output_tokens)

    def whole(self) -> bytes:
        """All answers."""
        choices = [self._choice(index, kept) for index, kept in enumerate(self._kept)]
        more = f',"prompt_logprobs":{prompt_entries(self._scores, self._names)}' if self._scores is not None else ""
        return self._frame.whole(choices, self._usage, more + self._asked())

    def usage_event(self) -> bytes:
        """Counts."""
        return self._frame.usage_event(self._usage).encode() if self._include_usage else b""

    def _choice(self, index: int, kept: _Kept) -> str:
        said = f'"content":{to_json("".join(kept.texts))}' if kept.calls is None else kept.calls.members()
        message = f'{{"role":"assistant",{said},"refusal":null}}'
        logprobs = _content(kept.logprobs) if self._fields.logprobs else "null"
        ids = f',"token_ids":{to_json(kept.token_ids)}' if self._fields.return_token_ids else ""
        finish = f'"finish_reason":{_reason(kept.finish, kept.calls)},"stop_reason":{kept.stop_reason}'
        return f'{{"index":{index},"message":{message},"logprobs":{logprobs},{finish}{ids}}}'

    def _chunk(self, piece: Piece, delta: str, logprobs: str, finish: str, more: str) -> str:
        choice = f'{{"index":{piece.sample},"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish}{more}}}'
        return self._frame.event(choice, len(self._prompt_ids), piece.first_index + len(piece.token_ids))

    def _logprobs(self, piece: Piece) -> str:
        if not piece.logprobs:
            return "null"
        return _content([chat_entry(entry, self._names) for entry in piece.logprobs if entry])

    def _asked(self) -> str:
        return f',"prompt_token_ids":{to_json(self._prompt_ids)}' if self._fields.return_token_ids else ""


def _reason(finish: Finish | None, calls: CallReader | None) -> str:
    """An answer that ended well with calls ended for them."""
    if finish is not None and finish.reason is FinishReason.STOP and calls is not None and calls.ended:
        return '"tool_calls"'
    return reason(finish)


def _content(entries: list[str]) -> str:
    return f'{{"content":[{",".join(entries)}],"refusal":null}}'
