"""The options by which commands reach a gateway that is secured."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
KEY_VARIABLE = "TWOSTROKE_API_KEY"
_FILE = click.Path(path_type=Path, dir_okay=False)
_META = "twostroke.access."
VARIABLES = frozenset({KEY_VARIABLE})
"""Variables that are no settings of a server, and secret."""


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    context.meta[_META + str(parameter.name)] = value


def access_options(command: Command) -> Command:
    """Adds them; the command asks `access()` for what they gave."""
    options: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("--tls", "tls", {"is_flag": True, "help": "Connect over TLS, trusting the public authorities."}),
        ("--ca", "ca", {"type": _FILE, "help": "Connect over TLS, trusting the authorities of this PEM file."}),
        ("--client-cert", "cert", {"type": _FILE, "help": "Certificate to show (PEM, with its chain)."}),
        ("--client-key", "cert_key", {"type": _FILE, "help": "Its private key (PEM)."}),
        ("--server-name", "name", {"default": "", "help": "Name of the gateway's certificate; default: the host."}),
        (
            "--api-key-file",
            "key_file",
            {"type": _FILE, "help": f"File with an API key or a token.  [default: ${KEY_VARIABLE}]"},
        ),
    )
    for flag, name, more in reversed(options):
        if not more.get("is_flag"):
            more["metavar"] = "NAME" if name == "name" else "FILE"
        command = click.option(flag, name, expose_value=False, callback=_keep, **more)(command)
    return command


def access() -> Any:
    """The `Access` that the running command's options ask for. The key never comes by a flag: all users see those."""
    from .client.access import Access, Secret

    context = click.get_current_context(silent=True)
    meta = context.meta if context is not None else {}
    given = {name: meta[_META + name] for name in ("tls", "ca", "cert", "cert_key", "name") if _META + name in meta}
    path, told = meta.get(_META + "key_file"), os.environ.get(KEY_VARIABLE, "")
    key = Secret.of_file(path) if path is not None else Secret(told) if told else None
    return Access(**given, key=key)
