"""Command-line options made from the settings' schema, so that a setting is written down once."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from pydantic.fields import FieldInfo

from ..errors import ConfigError
from .access_options import access_options
from .describe import COMMAND_FIELDS, default_text, flag, is_flag, is_list, kind_of
from .security.limits import LEAST_URGENT, MOST_URGENT
from .settings import Settings, Takes, split_address

Command = TypeVar("Command", bound=Callable[..., Any])
_METAVARS = {
    "a size": "SIZE",
    "a share over 0, up to 1, or a size such as 60GiB": "SHARE|SIZE",
    "an address, host:port": "HOST:PORT",
    "an address, host:port, or off": "HOST:PORT|off",
    "addresses, host:port,host:port": "HOST:PORT,...",
}


def _metavar(field: FieldInfo) -> str:
    for mark in field.metadata:
        if isinstance(mark, Takes):
            return _METAVARS.get(mark.text, "TEXT")
    kind = kind_of(field)
    if choices := [str(choice) for choice in get_args(kind) if isinstance(choice, (str, int))]:
        return "|".join(choices)
    if kind in (int, float):
        return "N" if kind is int else "X"
    return "PATH" if kind is Path else "TEXT"


def _option(name: str, field: FieldInfo) -> Callable[[Command], Command]:
    """Values stay text: the schema parses and refuses them, with one kind of message for all sources."""
    default = default_text(field)
    text = (field.description or "").replace("`", "") + (f"  [default: {default}]" if default else "")
    if is_flag(field):
        return click.option(f"{flag(name)}/{flag('no_' + name)}", name, default=None, help=text)
    return click.option(flag(name), name, metavar=_metavar(field), multiple=is_list(field), default=None, help=text)


def settings_options(*schemas: type[Settings], skip: Collection[str] = ()) -> Callable[[Command], Command]:
    """Adds `--config` and an option for each field of the schemas, those in `skip` apart.

    Where two schemas share a name, the first one's text stands.
    """
    fields: dict[str, FieldInfo] = {}
    for schema in schemas:
        own_first = sorted(schema.model_fields.items(), key=lambda item: item[0] in Settings.model_fields)
        for name, field in own_first:
            if name not in COMMAND_FIELDS and name not in skip:
                fields.setdefault(name, field)

    def decorate(command: Command) -> Command:
        for name, field in reversed(fields.items()):
            command = _option(name, field)(command)
        config = click.option(
            "--config",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="TOML file with settings  [default: $TWOSTROKE_CONFIG]",
        )
        return config(command)

    return decorate


def address_argument(_: click.Context, parameter: click.Parameter, value: str) -> str:
    """Callback of an address that is no setting. ConfigError for what is none."""
    try:
        split_address(value)
    except ValueError:
        message = f"{parameter.name}: got {value!r}, takes an address, host:port"
        raise ConfigError(message, field=parameter.name) from None
    return value


_address_option = click.option(
    "--address",
    envvar="TWOSTROKE_ADDRESS",
    default="127.0.0.1:50051",
    show_default=True,
    metavar="HOST:PORT",
    callback=address_argument,
    help="The gateway.",
)


priority_option = click.option(
    "--priority",
    type=click.IntRange(MOST_URGENT, LEAST_URGENT),
    default=0,
    metavar="N",
    help="Lower values go first, strictly  [default: 0]",
)


def gateway_option(command: Command) -> Command:
    """Of every command that talks to a gateway: where it is, and how it is secured (`access()`)."""
    return _address_option(access_options(command))


def given_flags(options: dict[str, Any]) -> dict[str, object]:
    """The options that were given on the command line, by field name."""
    return {name: value for name, value in options.items() if value is not None and value != ()}
