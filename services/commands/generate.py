"""`twostroke generate`: asks a gateway and streams its answer."""

import asyncio
import io
import json
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from ...errors import ConfigError
from ..access_options import access
from ..options import gateway_option, priority_option
from ..sampling_flags import read_sampling_flags, read_stopping_flags, sampling_flags

if TYPE_CHECKING:
    from ...v1 import inference_pb2 as pb
    from ..client.client import Client, Measured

MAX_ANSWERS = 16
MAX_PROMPT = 64 << 20  # characters; the gateway's own limit is lower


@click.command()
@click.argument("words", nargs=-1, metavar="[PROMPT]...")
@click.option("--prompt", metavar="TEXT", help="The prompt; else the words on the command line, else stdin.")
@gateway_option
@click.option("--model", default="", metavar="NAME", help="Served name  [default: whatever it serves]")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the model's chat template.")
@click.option("--system", metavar="TEXT", help="System message of the chat.")
@click.option(
    "--max-tokens", type=click.IntRange(1), metavar="N", help="Most tokens to generate  [default: the model's context]"
)
@click.option(
    "--n",
    "answers",
    type=click.IntRange(1, MAX_ANSWERS),
    default=1,
    metavar="N",
    help="Independent answers to the prompt, which is computed once  [default: 1]",
)
@sampling_flags
@click.option(
    "--logprobs",
    type=click.IntRange(0, 20),
    metavar="N",
    help="With --json: log-probabilities of each token and of the top N.",
)
@click.option(
    "--prompt-logprobs",
    type=click.IntRange(0, 20),
    metavar="N",
    help="With --json: log-probabilities of the prompt's tokens and of the top N.",
)
@priority_option
@click.option("--timeout", "timeout_s", type=click.FloatRange(0.001), metavar="SECONDS", help="Deadline of the call.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a message, the last with the timings.")
def generate(words: tuple[str, ...], as_json: bool, timeout_s: float | None, **options: Any) -> None:
    """Stream an answer from a running gateway.

    \b
    Examples:
      twostroke generate "Why is the sky blue?"
      twostroke generate --raw --temperature 0 --max-tokens 20 "Once upon a time"
      git diff | twostroke generate --system "Write a commit message." --json

    The answer goes to stdout, the timings to stderr.
    """
    prompt = _prompt(options["prompt"], words)
    for name in ("model", "system", "stop", "bad_word"):
        unicode_text(name, "".join(options[name] or ()))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what a terminal's encoding lacks
    try:
        asyncio.run(_run(prompt, as_json, timeout_s, options))
    except (KeyboardInterrupt, asyncio.CancelledError):  # the call was cancelled on the way out
        click.echo("", err=True)
        raise SystemExit(130) from None


def _prompt(given: str | None, words: tuple[str, ...]) -> str:
    if given is not None and words:
        raise ConfigError("prompt: got both --prompt and words, takes one of them", field="prompt")
    if given is not None or words:
        return unicode_text("prompt", given if given is not None else " ".join(words))
    text = "" if sys.stdin is None or sys.stdin.isatty() else _from_stdin()
    if not text:
        raise ConfigError('prompt: got nothing, takes a text: twostroke generate "Why?"', field="prompt")
    return unicode_text("prompt", text).removesuffix("\n")  # that `echo` adds


def _from_stdin() -> str:
    try:
        return sys.stdin.read(MAX_PROMPT)
    except UnicodeDecodeError:
        raise _not_unicode("prompt") from None


def unicode_text(field: str, text: str) -> str:
    """The text itself. ConfigError where it came from bytes that are none: Python hides those in lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _not_unicode(field) from None
    return text


def _not_unicode(field: str) -> ConfigError:
    return ConfigError(f"{field}: got bytes that are not {sys.getfilesystemencoding()}, takes a text", field=field)


async def _run(prompt: str, as_json: bool, timeout_s: float | None, options: dict[str, Any]) -> None:
    from ..client.client import Client, Measured

    # By the loop's handler, which wakes it: asyncio.run's own can be missed by a loop that is about to wait.
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    async with Client(options["address"], access=access()) as client:
        model = await client.model(options["model"])
        measured = Measured()
        request = build_request(prompt, options, chat=model.has_chat_template and not options["raw"])
        show = _show_json if as_json else _show_text
        await show(client, request, timeout_s, measured)


def build_request(prompt: str, options: dict[str, Any], *, chat: bool) -> "pb.GenerateRequest":
    """The request that the options describe; what was not given stays absent, for the gateway to fill in."""
    from ...v1 import inference_pb2 as pb

    request = pb.GenerateRequest(
        model=options["model"],
        logprobs=options["logprobs"],
        prompt_logprobs=options["prompt_logprobs"],
        n=options.get("answers", 1),
        priority=options["priority"],
    )
    if chat:
        if options["system"] is not None:
            request.input.chat.messages.add(role="system", content=options["system"])
        request.input.chat.messages.add(role="user", content=prompt)
    elif options["system"] is not None:
        raise ConfigError(
            "system: got a text, takes none with --raw or a model without a chat template", field="system"
        )
    else:
        request.input.text = prompt
    request.sampling.CopyFrom(read_sampling_flags(options))
    request.stopping.CopyFrom(read_stopping_flags(options))
    return request


async def _show_text(
    client: "Client", request: "pb.GenerateRequest", timeout_s: float | None, measured: "Measured"
) -> None:
    from ..gateway.answer_order import AnswerOrder

    finish = None
    begun = False
    on_terminal = sys.stdout.isatty()
    order, last = AnswerOrder(max(1, request.n)), request.n - 1
    try:
        async for piece in client.generate(request, timeout_s, measured):
            for answer, text, whole in order.push(piece.sample, piece.text, ended=piece.HasField("finish")):
                begun = True
                sys.stdout.write(printable(text) if on_terminal else text)
                sys.stdout.write("\n\n" if whole and answer < last else "")
                sys.stdout.flush()
            finish = piece.finish if piece.HasField("finish") else finish
    finally:
        if begun:  # an error takes a line of its own
            sys.stdout.write("\n")
            sys.stdout.flush()
    if finish is not None:
        click.echo(click.style(summary(finish, measured, request.n), dim=True), err=True)


async def _show_json(
    client: "Client", request: "pb.GenerateRequest", timeout_s: float | None, measured: "Measured"
) -> None:
    from google.protobuf.json_format import MessageToDict

    async for piece in client.generate(request, timeout_s, measured):
        message = MessageToDict(piece, preserving_proto_field_name=True)
        if piece.HasField("finish"):
            message["client"] = {
                "first_token_s": measured.first_token_s,
                "gap01_s": measured.gap01_s,
                "tokens_per_s": measured.tokens_per_s,
                "tokens": measured.tokens,
            }
        print(json.dumps(message, ensure_ascii=False), flush=True)


def printable(text: str) -> str:
    """Without control characters but newline and tab: a model's answer must not steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160))


def summary(finish: "pb.Finish", measured: "Measured", answers: int = 1) -> str:
    """The timings, in two lines: what the client saw, and where the gateway says the time went.

    `finish`: of the last answer; of several, the tokens of all are told.
    """
    usage, spent = finish.usage, finish.timings
    reason = {1: "stopped", 2: "length reached"}.get(finish.reason, "ended")
    tokens = (
        f"{usage.output_tokens} tokens ({reason})" if answers < 2 else f"{measured.tokens} tokens, {answers} answers"
    )
    seen = [tokens, f"first token {measured.first_token_s * 1000:.0f} ms"]
    if measured.tokens > 1:
        seen += [
            f"{measured.tokens_per_s:.1f} tokens/s",
            f"gap01 {(spent.gap01_us or measured.gap01_s * 1e6) / 1000:.1f} ms",
        ]
    where = [f"prompt {usage.prompt_tokens} tokens, {usage.cached_tokens} cached"]
    for name, value in (("queue", spent.queue_us), ("prefill", spent.prefill_us), ("transfer", spent.transfer_us)):
        where.append(f"{name} {value / 1000:.1f} ms")
    workers = [finish.prefill_worker, finish.decode_worker]
    where += [" -> ".join(dict.fromkeys(worker for worker in workers if worker))] if any(workers) else []
    return f"[{', '.join(seen)}]\n[{', '.join(where)}, seed {finish.seed}]"
