"""`twostroke chat`: a conversation with a gateway's model, in the terminal or through a pipe."""

import asyncio
import io
import signal
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import click

from ...errors import InvalidRequest, TwostrokeError
from ..access_options import access
from ..options import gateway_option, priority_option
from .generate import printable, unicode_text

if TYPE_CHECKING:
    from ...v1 import inference_pb2 as pb
    from ..client.chat import Answered, Chat
    from ..client.chat_input import Entry

INTERRUPTED = 130
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed",
)  # fmt: skip
HELP = '''\
  /reset         begin a new conversation; the system message stays
  /system TEXT   another system message from now on; without TEXT: none
  /exit          leave, as Ctrl-D does
  /help          this
Ctrl-C stops an answer; what came of it stays in the conversation.
A line that ends with \\ goes on in the next one; """ begins and ends a text of several lines.
A message that begins with / is written with //.'''
_SHARE = click.FloatRange(0, 1)
_PENALTY = click.FloatRange(-10, 10)


@click.command()
@gateway_option
@click.option("--model", default="", metavar="NAME", help="Served name  [default: whatever it serves]")
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--max-tokens", type=click.IntRange(1, 2**32 - 1), metavar="N", help="Most tokens of an answer.")
@click.option("--temperature", type=click.FloatRange(0, 100), metavar="X", help="0 is greedy  [default: 1]")
@click.option("--top-k", type=click.IntRange(0, 2**31 - 1), metavar="N", help="Keep the N likeliest tokens; 0: all.")
@click.option("--top-p", type=_SHARE, metavar="X", help="Keep the likeliest tokens that add up to X  [default: 1]")
@click.option("--min-p", type=_SHARE, metavar="X", help="Keep tokens at least X as likely as the likeliest.")
@click.option("--typical-p", type=_SHARE, metavar="X", help="Locally typical sampling  [default: 1]")
@click.option("--repetition-penalty", type=click.FloatRange(0, 100), metavar="X", help="Over 1: repeat less.")
@click.option("--presence-penalty", type=_PENALTY, metavar="X", help="Taken off tokens that the answer has.")
@click.option("--frequency-penalty", type=_PENALTY, metavar="X", help="The same, for each time.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), metavar="N", help="Same seed, same noise  [default: drawn]")
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop an answer before this text; may be repeated.")
@priority_option
@click.option("--timeout", "timeout_s", type=click.FloatRange(0.001), metavar="SECONDS", help="Deadline of an answer.")
@click.pass_context
def chat(context: click.Context, /, **options: Any) -> None:
    """Talk with the model of a running gateway.

    \b
    Examples:
      twostroke chat
      twostroke chat --system "Answer in one sentence." --temperature 0.7
      printf 'My name is Ada.\\nWhat is my name?\\n' | twostroke chat --temperature 0

    Ctrl-C stops an answer, Ctrl-D or /exit ends the chat, /help tells the rest. Through a pipe each line is a message;
    answers go to stdout, timings to stderr, and the first error ends it with exit code 1.
    """
    for name in ("model", "system", "stop"):
        unicode_text(name, "".join(options[name] or ()))
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what is no text must not end the chat
    with asyncio.Runner() as runner:
        try:
            conversing = runner.run(_connect(options))
            try:
                code = Terminal(runner, conversing).run()
            finally:
                runner.run(conversing.close())
        except KeyboardInterrupt:
            code = INTERRUPTED
    context.exit(code)


async def _connect(options: dict[str, Any]) -> "Chat":
    """Finds the gateway and looks whether its model can chat."""
    from ..client.chat import Chat
    from ..client.client import Client
    from ..client.conversation import Conversation

    chat = Chat(
        Client(options["address"], access=access()),
        build_request(options),
        Conversation(options["system"]),
        timeout_s=options["timeout_s"],
    )
    try:
        model = await chat.open()
    except BaseException:
        await chat.close()
        raise
    if sys.stdin.isatty():
        _aside(f"{model.model} at {options['address']}. /help tells what can be typed, Ctrl-D ends.")
    return chat


def build_request(options: dict[str, Any]) -> "pb.GenerateRequest":
    """What all questions have in common; what was not given stays absent, for the gateway to fill in."""
    from ...v1 import inference_pb2 as pb

    sampling = {name: options[name] for name in SAMPLING if options[name] is not None}
    return pb.GenerateRequest(
        model=options["model"],
        priority=options["priority"],
        sampling=pb.Sampling(**sampling),
        stopping=pb.Stopping(max_tokens=options["max_tokens"], strings=options["stop"]),
    )


class Terminal:
    """Reads, asks, writes; decorates only where a person types."""

    def __init__(self, runner: asyncio.Runner, chat: "Chat") -> None:
        self._runner, self._chat = runner, chat
        self._person = sys.stdin.isatty()
        self._on_terminal = sys.stdout.isatty()
        self._column_0 = True  # of the answer that is being written
        if self._person:
            import readline  # noqa: F401 - input() edits lines with it from now on

    def run(self) -> int:
        """Until the input ends; the exit code."""
        from ..client.chat_input import read_entry

        interrupted = False
        while True:
            try:
                if interrupted:  # told of here, where a further Ctrl-C is caught, too
                    interrupted = False
                    self._newline()
                    _aside("\nCtrl-D or /exit ends the chat.")
                entry = read_entry(self._read_line)
                if entry is None:
                    self._leave()
                    return 0
                code = self._obey(entry)
                if code is not None:
                    return code
            except (KeyboardInterrupt, asyncio.CancelledError):  # while typing, or between two things
                if not self._person:
                    return INTERRUPTED
                interrupted = True
            except (TwostrokeError, ValueError) as error:
                self._newline()
                click.echo(f"error: {error}", err=True)
                if not self._person:
                    return 1
                if isinstance(error, InvalidRequest):
                    _aside("/reset begins a new conversation.")

    def _read_line(self, more: bool) -> str | None:
        """A line without its end. `input` edits it where both ends are a terminal."""
        if not self._person:
            line = sys.stdin.readline()
            return line.removesuffix("\n").removesuffix("\r") if line else None
        prompt = "... " if more else "> "
        if not self._on_terminal:  # the prompt is no part of the answers
            click.echo(prompt, nl=False, err=True)
            prompt = ""
        try:
            return input(prompt)
        except EOFError:
            return None

    def _obey(self, entry: "Entry") -> int | None:
        """An exit code ends the chat."""
        from ..client.chat_input import Command

        conversation = self._chat.conversation
        match entry.command:
            case None:
                return self._ask(entry.text)
            case Command.EXIT:
                return 0
            case Command.RESET:
                conversation.reset()
                _aside("A new conversation.")
            case Command.SYSTEM:
                conversation.system = entry.text or None
                _aside("Another system message." if entry.text else "No system message.")
            case Command.HELP:
                click.echo(HELP, err=True)
            case Command.UNKNOWN:
                raise ValueError(f"{entry.text} is no command: /help lists them; // begins a message with /")
        return None

    def _ask(self, text: str) -> int | None:
        answered = self._runner.run(_stoppable(self._chat.ask(text, self._show)))
        self._newline()
        _aside(answered.summary())
        if not answered.kept:
            _aside("Nothing had come: the question is forgotten.")
        return INTERRUPTED if answered.finish is None and not self._person else None

    def _show(self, text: str) -> None:
        if text:
            sys.stdout.write(printable(text) if self._on_terminal else text)
            sys.stdout.flush()
            self._column_0 = text.endswith("\n")

    def _newline(self) -> None:
        """Ends an answer's last line."""
        if not self._column_0:
            self._show("\n")

    def _leave(self) -> None:
        if self._person:
            click.echo("", err=True)  # behind the prompt


async def _stoppable(work: Coroutine[Any, Any, "Answered"]) -> "Answered":
    """SIGINT cancels it. The loop's own handler wakes it; the runner's can be missed by a loop about to sleep."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is not None:
        loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        return await work
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _aside(text: str) -> None:
    """What is no answer."""
    click.echo(click.style(text, dim=True), err=True)
