"""Replies of `/v1/chat/completions`."""

from dataclasses import dataclass, field

from ....engine.request import PromptLogprobs
from ..generation import Finish, Piece
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


class ChatReply:
    """See `Reply`. A chat is one prompt."""

    def __init__(self, name: str, model: str, fields: ChatFields, names: TokenNames, prompt_ids: list[int]) -> None:
        """`prompt_ids`: where they are to be told."""
        kind = "chat.completion.chunk" if fields.stream else "chat.completion"
        self._include_usage = fields.include_usage()
        self._frame = Frame(f"chatcmpl-{name}", kind, model, usage=self._include_usage)
        self._fields = fields
        self._stops = frozenset(fields.stop_token_ids)
        self._names = names
        self._prompt_ids = prompt_ids
        self._usage = Usage()
        self._kept = [_Kept() for _ in range(fields.n)]
        self._greeted = [False] * fields.n
        self._scores: PromptLogprobs | None = None
        self._size = 0

    def events(self, prompt: int, piece: Piece) -> bytes:
        """The first chunk of an answer tells the role, the last one why it ended."""
        answer = piece.sample
        chunks = []
        if not self._greeted[answer]:
            self._greeted[answer] = True
            chunks.append(self._chunk(answer, '{"role":"assistant","content":""}', "null", "null", self._asked()))
        if piece.text or piece.logprobs or (self._fields.return_token_ids and piece.token_ids):
            logprobs = self._logprobs(piece)
            ids = f',"token_ids":{to_json(piece.token_ids)}' if self._fields.return_token_ids else ""
            chunks.append(self._chunk(answer, f'{{"content":{to_json(piece.text)}}}', logprobs, "null", ids))
        if piece.finish is not None:
            self._usage.add(prompt, piece.finish, piece.finish.output_tokens)
            stop = f',"stop_reason":{stop_reason(piece.finish, piece, self._stops)}'
            chunks.append(self._chunk(answer, "{}", "null", reason(piece.finish), stop))
        return "".join(chunks).encode("utf-8", "replace")

    def take(self, prompt: int, piece: Piece) -> None:
        """Keeps a piece."""
        kept = self._kept[piece.sample]
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
        message = f'{{"role":"assistant","content":{to_json("".join(kept.texts))},"refusal":null}}'
        logprobs = _content(kept.logprobs) if self._fields.logprobs else "null"
        ids = f',"token_ids":{to_json(kept.token_ids)}' if self._fields.return_token_ids else ""
        return (
            f'{{"index":{index},"message":{message},"logprobs":{logprobs},"finish_reason":{reason(kept.finish)},'
            f'"stop_reason":{kept.stop_reason}{ids}}}'
        )

    def _chunk(self, index: int, delta: str, logprobs: str, finish: str, more: str) -> str:
        return self._frame.event(
            f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish}{more}}}'
        )

    def _logprobs(self, piece: Piece) -> str:
        if not piece.logprobs:
            return "null"
        return _content([chat_entry(entry, self._names) for entry in piece.logprobs if entry])

    def _asked(self) -> str:
        return f',"prompt_token_ids":{to_json(self._prompt_ids)}' if self._fields.return_token_ids else ""


def _content(entries: list[str]) -> str:
    return f'{{"content":[{",".join(entries)}],"refusal":null}}'
