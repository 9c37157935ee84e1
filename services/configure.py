"""Fills the settings: flags over `TWOSTROKE_*` variables over the TOML file over defaults.

Every wrong value becomes one line that names the field, what it got, what it takes and where it came from.
"""

import difflib
import logging
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from ..errors import ConfigError
from .access_options import VARIABLES
from .describe import COMMAND_FIELDS, SECTIONS, flag, own_fields, takes, variable
from .settings import ENV_PREFIX, GatewaySettings, Settings, UpSettings, WorkerSettings

logger = logging.getLogger(__name__)
S = TypeVar("S", bound=Settings)
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"


@dataclass(frozen=True, slots=True)
class Given:
    """A value and where it came from."""

    value: object
    origin: str


def load(schema: type[S], flags: Mapping[str, object], config: Path | None = None) -> S:
    """The settings of one process.

    `flags`: what the command line gave, by field name; keys of other schemas are left alone. `config`: the TOML file;
    None: the one that TWOSTROKE_CONFIG names, if any. Raises ConfigError, a line for each wrong value.
    """
    named = config or (Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
    given = read_file(named, schema) if named is not None else {}
    for name, value in EnvSettingsSource(schema)().items():
        if name not in COMMAND_FIELDS:
            given[name] = Given(value, f"variable {variable(name)}")
    for name, value in flags.items():
        if name in schema.model_fields:
            given[name] = Given(value, f"flag {flag(name)}")
    values: dict[str, Any] = {name: entry.value for name, entry in given.items()}
    try:
        return schema(**values)
    except ValidationError as error:
        raise _readable(schema, given, error) from None


def load_up(
    flags: Mapping[str, object], config: Path | None = None
) -> tuple[UpSettings, GatewaySettings, WorkerSettings]:
    """The settings of the supervisor, of its gateway, and the pattern of its workers' (role and addresses are its own).

    Flags and variables reach whichever of the three has that field; `listen` is the gateway's, names are drawn.
    """
    alone = {name: value for name, value in flags.items() if name not in ("listen", "name")}
    worker = load(
        WorkerSettings, {**alone, "role": "both", "listen": "127.0.0.1:0", "advertise": "", "name": ""}, config
    )
    gateway = load(GatewaySettings, {**flags, "name": "gateway", "workers": []}, config)
    return load(UpSettings, alone, config), gateway, worker


def read_file(path: Path, schema: type[Settings]) -> dict[str, Given]:
    """What the file says for `schema`: its own table over the shared keys at the top. Every key in it is checked."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}", field="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}", field="config") from error
    given: dict[str, Given] = {}
    for key, value in content.items():
        if key in SECTIONS:
            names = [*own_fields(SECTIONS[key]), *(Settings.model_fields if key != "up" else ())]
            if not isinstance(value, dict):
                raise ConfigError(f"{key}: got {_show(value)}, takes a table [{key}] (file {path})", field=key)
            for name in value:
                if name not in names:
                    raise _unknown(name, f"file {path}, [{key}]", names)
        elif key in Settings.model_fields:
            given[key] = Given(value, f"file {path}")
        else:
            raise _unknown(key, f"file {path}", [*Settings.model_fields, *(f"[{name}]" for name in SECTIONS)])
    section = next((name for name, candidate in SECTIONS.items() if candidate is schema), "")
    for name, value in content.get(section, {}).items():
        given[name] = Given(value, f"file {path}, [{section}]")
    return given


def setting_variables() -> set[str]:
    """The environment variables that mean something here."""
    return {CONFIG_VARIABLE, *(variable(name) for schema in SECTIONS.values() for name in schema.model_fields)}


def warn_of_unknown_variables() -> None:
    """Names the TWOSTROKE_* variables that look like a misspelt setting. Others may be the platform's own: no error."""
    known = setting_variables() | VARIABLES
    for name in os.environ:
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
            for near in _near(name.upper(), known, cutoff=0.85):
                logger.warning("variable %s is not a setting; did you mean %s?", name, near)


def _near(name: str, choices: Iterable[str], cutoff: float = 0.6) -> list[str]:
    return difflib.get_close_matches(name, list(choices), n=1, cutoff=cutoff)


def _unknown(name: str, where: str, choices: Iterable[str]) -> ConfigError:
    near = _near(name, choices)
    homes = [f"[{section}]" for section, schema in SECTIONS.items() if name in own_fields(schema)]
    homes += ["the top of the file"] if name in Settings.model_fields else []
    hint = ""
    if homes:
        hint = f"; it belongs into {' or '.join(homes)}"
    elif near:
        hint = f"; did you mean {near[0]}?"
    return ConfigError(f"{name}: no such setting ({where}){hint}", field=name)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _readable(schema: type[Settings], given: Mapping[str, Given], error: ValidationError) -> ConfigError:
    lines: dict[str, str] = {}
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        name = str(problem["loc"][0])
        if name not in schema.model_fields:
            lines[name] = f"{name}: no such setting"
            continue
        entry = given.get(name)
        got, origin = (_show(entry.value), f" ({entry.origin})") if entry is not None else ("nothing", "")
        lines[name] = f"{name}: got {got}, takes {takes(schema.model_fields[name])}{origin}"
    return ConfigError("\n".join(lines.values()), field=next(iter(lines)))


def flags_of(settings: Settings) -> list[str]:
    """The command-line flags that make `settings` again, wherever they differ from the defaults."""
    words: list[str] = []
    for name, field in type(settings).model_fields.items():
        value: Any = getattr(settings, name)
        if name in COMMAND_FIELDS or value == field.get_default(call_default_factory=True, validated_data={}):
            continue
        if isinstance(value, bool):
            words.append(flag(name) if value else flag("no_" + name))
        else:
            words += [flag(name), ",".join(value) if isinstance(value, list) else str(value)]
    return words
