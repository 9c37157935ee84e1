"""What is typed into a chat: lines, blocks, commands."""

from collections.abc import Callable

import pytest

from twostroke.services.client.chat_input import MAX_MESSAGE, Command, Entry, read_entry


def reader(text: str) -> tuple[Callable[[bool], str | None], list[bool]]:
    lines, asked = iter(text.split("\n")), []

    def read(more: bool) -> str | None:
        asked.append(more)
        return next(lines, None)

    return read, asked


def entries(text: str) -> list[Entry]:
    read, _ = reader(text)
    return list(iter(lambda: read_entry(read), None))


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("hello", ["hello"]),
        ("\n  \n\na\n\nb", ["a", "b"]),
        ("a\\\nb\\\n c", ["a\nb\n c"]),
        ("a\\\n", ["a\n"]),
        ("a\\", ["a"]),  # the input ends in the middle
        ("\\\n\\\n", []),
        ('"""one"""', ["one"]),
        ('"""\nx\n\n/y\\\n"""\nz', ["x\n\n/y\\", "z"]),
        ('  """a\nb"""  \nc', ["a\nb", "c"]),
        ('"""a\nb', ["a\nb"]),
        ('""""""', []),
        ('"""\n\n"""\nx', ["x"]),
        ('say """this"""', ['say """this"""']),
        ("//etc is what?", ["/etc is what?"]),
        ('"""/exit"""', ["/exit"]),
        (" /exit", [" /exit"]),
        ('"""pasted\nat once"""', ["pasted\nat once"]),
    ],
)
def test_messages(text: str, messages: list[str]) -> None:
    assert [(entry.text, entry.command) for entry in entries(text)] == [(message, None) for message in messages]


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("/exit", Entry("", Command.EXIT)),
        ("/exit  ", Entry("", Command.EXIT)),
        ("/reset", Entry("", Command.RESET)),
        ("/help me", Entry("me", Command.HELP)),
        ("/system be brief, please", Entry("be brief, please", Command.SYSTEM)),
        ("/system", Entry("", Command.SYSTEM)),
        ("/system a\\\nb", Entry("a\nb", Command.SYSTEM)),
        ("/nonsense a b", Entry("/nonsense", Command.UNKNOWN)),
        ("/", Entry("/", Command.UNKNOWN)),
    ],
)
def test_commands(text: str, entry: Entry) -> None:
    assert entries(text) == [entry]


def test_continued_lines_are_asked_for_as_such() -> None:
    read, asked = reader('\na\\\nb\n"""c\nd"""')
    assert [read_entry(read), read_entry(read)] == [Entry("a\nb"), Entry("c\nd")]
    assert asked == [False, False, True, False, True]


@pytest.mark.parametrize("text", ['"""' + "x\n" * 9, "x\\\n" * 9])
def test_messages_are_bounded(text: str) -> None:
    long = text.replace("x", "x" * (MAX_MESSAGE // 8))
    with pytest.raises(ValueError, match="at most"):
        entries(long)
    with pytest.raises(ValueError, match="at most"):
        entries("x" * (MAX_MESSAGE + 1))
