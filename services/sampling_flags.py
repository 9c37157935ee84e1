"""Flags of commands that generate: how tokens are drawn and when to stop."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..v1 import inference_pb2 as pb

TOKEN_ID = click.IntRange(0, 2**32 - 1)
COUNT = click.IntRange(0, 2**32 - 1)


def token_biases(_: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    """Callback of `ID=X`, tokens and what is added to their logits. ConfigError for what is none."""
    biases: dict[int, float] = {}
    for value in values:
        token, _sign, bias = value.partition("=")
        try:
            number = float(bias)
        except ValueError:
            number = math.nan
        known = token.isascii() and token.isdigit() and len(token) <= 10 and int(token) < 1 << 32
        if not (known and math.isfinite(number)):
            message = f"{parameter.name}: got {value!r}, takes a token id and a number, such as 13=-2.5"
            raise ConfigError(message, field=parameter.name)
        biases[int(token)] = number
    return biases


FLAGS: tuple[Callable[..., Any], ...] = (
    click.option("--temperature", type=float, metavar="X", help="0 is greedy  [default: 1]"),
    click.option("--top-k", type=COUNT, metavar="N", help="Keep the N likeliest tokens; 0: all  [default: 0]"),
    click.option("--top-p", type=float, metavar="X", help="Keep the likeliest tokens that add up to X  [default: 1]"),
    click.option(
        "--min-p", type=float, metavar="X", help="Keep tokens at least X times as likely as the likeliest  [default: 0]"
    ),
    click.option(
        "--typical-p", type=float, metavar="X", help="Keep the most typical tokens that add up to X  [default: 1]"
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="Over 1: less of what the prompt or the answer has  [default: 1]",
    ),
    click.option(
        "--presence-penalty", type=float, metavar="X", help="Taken from tokens that the answer has  [default: 0]"
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="Taken from tokens for each time that the answer has them  [default: 0]",
    ),
    click.option(
        "--bias",
        multiple=True,
        metavar="ID=X",
        callback=token_biases,
        help="Add X to a token's logit; may be repeated.",
    ),
    click.option(
        "--allow-token", type=TOKEN_ID, multiple=True, metavar="ID", help="Draw only such tokens; may be repeated."
    ),
    click.option(
        "--ban-token", type=TOKEN_ID, multiple=True, metavar="ID", help="Never draw this token; may be repeated."
    ),
    click.option("--bad-word", multiple=True, metavar="TEXT", help="Never complete this text; may be repeated."),
    click.option("--json-object", is_flag=True, help="The answer is a JSON object."),
    click.option(
        "--json-schema", type=click.File(encoding="utf-8"), metavar="FILE", help="The answer is JSON of this schema."
    ),
    click.option("--regex", metavar="TEXT", help="The answer matches this regular expression as a whole."),
    click.option("--choice", multiple=True, metavar="TEXT", help="The answer is one of these; may be repeated."),
    click.option(
        "--grammar",
        type=click.File(encoding="utf-8"),
        metavar="FILE",
        help="The answer is what this Lark grammar produces.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**64 - 1),
        metavar="N",
        help="Same seed, same noise  [default: drawn, and told]",
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; may be repeated."),
    click.option(
        "--stop-token", multiple=True, type=TOKEN_ID, metavar="ID", help="Stop after this token; may be repeated."
    ),
    click.option("--include-stop", is_flag=True, help="Send the text that stopped it too."),
    click.option("--ignore-eos", is_flag=True, help="Go on past the model's own end."),
    click.option("--min-tokens", type=COUNT, default=0, metavar="N", help="Do not stop before N tokens."),
)


def sampling_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds all of them to a command, in their order."""
    for flag in reversed(FLAGS):
        command = flag(command)
    return command


def read_sampling_flags(options: dict[str, Any]) -> "pb.Sampling":
    """What was not given stays absent, for the gateway to fill in."""
    from ..v1 import inference_pb2 as pb

    single = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return pb.Sampling(
        **{name: options[name] for name in (*single, *penalties)},
        logit_bias=options["bias"],
        allowed_token_ids=options["allow_token"],
        banned_token_ids=options["ban_token"],
        bad_words=options["bad_word"],
        constraint=read_constraint_flags(options),
    )


def read_constraint_flags(options: dict[str, Any]) -> "pb.Constraint | None":
    """ConfigError where there are several."""
    from ..v1 import inference_pb2 as pb

    given = [name for name in ("json_object", "json_schema", "regex", "choice", "grammar") if options.get(name)]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]}: an answer takes one of them", field=given[1])
    match given:
        case ["json_object"]:
            return pb.Constraint(json_object=True)
        case ["json_schema"]:
            return pb.Constraint(json_schema=options["json_schema"].read())
        case ["regex"]:
            return pb.Constraint(regex=options["regex"])
        case ["choice"]:
            return pb.Constraint(choice=pb.Choice(texts=options["choice"]))
        case ["grammar"]:
            return pb.Constraint(grammar=options["grammar"].read())
        case _:
            return None


def read_stopping_flags(options: dict[str, Any]) -> "pb.Stopping":
    """`max_tokens` is the command's own flag."""
    from ..v1 import inference_pb2 as pb

    return pb.Stopping(
        max_tokens=options["max_tokens"],
        strings=options["stop"],
        token_ids=options["stop_token"],
        ignore_eos=options["ignore_eos"],
        min_tokens=options["min_tokens"],
        include_stop=options["include_stop"],
    )
