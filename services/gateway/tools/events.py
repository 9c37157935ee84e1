"""What a model's text turns out to be, piece by piece: plain text, and calls of functions."""

from typing import NamedTuple, TypeAlias


class Text(NamedTuple):
    """Is for people."""

    text: str


class CallBegun(NamedTuple):
    """A call, by the function's name."""

    name: str


class Arguments(NamedTuple):
    """The next piece of a call's arguments, JSON as the model wrote it."""

    text: str


class CallEnded(NamedTuple):
    """The call is whole: its arguments are a JSON object."""


class CallBroken(NamedTuple):
    """The call that had begun is none after all. `text`: all of it, as the model wrote it."""

    text: str


Event: TypeAlias = Text | CallBegun | Arguments | CallEnded | CallBroken


def joined(events: list[Event]) -> list[Event]:
    """The same with neighbours of one kind made one: how the text was cut does not show any more."""
    told: list[Event] = []
    for event in events:
        last = told[-1] if told else None
        if isinstance(event, Text) and isinstance(last, Text):
            told[-1] = Text(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            told[-1] = Arguments(last.text + event.text)
        else:
            told.append(event)
    return told
