"""Calls of tools in an answer: as the deltas of a stream, and as members of a whole message."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..tools.events import Arguments, CallBegun, CallBroken, CallEnded, Event, Text
from ..tools.formats import ToolFormat
from ..tools.tool_parser import ToolParser
from ..tools.wish import ToolWish
from .logprobs import to_json


@dataclass(frozen=True, slots=True)
class Tools:
    """What a chat may call, and how its model writes that."""

    wish: ToolWish
    format: ToolFormat

    def reader(self) -> "CallReader":
        """Of one answer."""
        return CallReader(self.format.parser(self.wish.names), self.format.new_id, single=self.wish.single)


@dataclass(slots=True)
class _Call:
    """As far as it goes."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class CallReader:
    """Of one answer. Asked for deltas, or to keep, not both."""

    def __init__(self, parser: ToolParser, new_id: Callable[[], str], *, single: bool) -> None:
        """`single`: further calls are dropped."""
        self._parser = parser
        self._new_id = new_id
        self._single = single
        self._begun = 0
        self._texts: list[str] = []
        self._calls: list[_Call] = []
        self.ended = 0
        """Whole calls so far."""

    def deltas(self, text: str, *, last: bool) -> list[str]:
        """JSON of what is new. A call that breaks off stays as it is: what follows is text."""
        return [delta for event in self._read(text, last=last) if (delta := self._delta(event))]

    def keep(self, text: str, *, last: bool) -> None:
        """Takes what is new. A call that breaks off becomes text."""
        for event in self._read(text, last=last):
            match event:
                case Text(text):
                    self._texts.append(text)
                case CallBegun(name):
                    self._calls.append(_Call(self._new_id(), name))
                case Arguments(text):
                    self._calls[-1].arguments.append(text)
                case CallBroken(text):
                    self._calls.pop()
                    self._texts.append(text)

    def members(self) -> str:
        """`content` and `tool_calls` of the message that was kept."""
        content = "".join(self._texts)
        if not self._calls:
            return f'"content":{to_json(content)}'
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for call in self._calls
        ]
        return f'"content":{to_json(content or None)},"tool_calls":{to_json(calls)}'

    def _read(self, text: str, *, last: bool) -> list[Event]:
        events = self._parser.push(text)
        if last:
            events += self._parser.flush()
        taken: list[Event] = []
        for event in events:
            if self._single and self.ended and not isinstance(event, Text):
                continue
            self.ended += isinstance(event, CallEnded)
            taken.append(event)
        return taken

    def _delta(self, event: Event) -> str:
        match event:
            case Text(text):
                return f'{{"content":{to_json(text)}}}'
            case CallBegun(name):
                self._begun += 1
                function = f'{{"name":{to_json(name)},"arguments":""}}'
                told = f'"id":{to_json(self._new_id())},"type":"function","function":{function}'
            case Arguments(text):
                told = f'"function":{{"arguments":{to_json(text)}}}'
            case _:
                return ""
        return f'{{"tool_calls":[{{"index":{self._begun - 1},{told}}}]}}'
