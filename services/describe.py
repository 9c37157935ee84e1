"""Says in words what a setting takes: for errors, `--help` and docs/configuration.md."""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from .settings import ENV_PREFIX, GatewaySettings, Settings, Takes, UpSettings, WorkerSettings

SECTIONS: dict[str, type[Settings]] = {"gateway": GatewaySettings, "worker": WorkerSettings, "up": UpSettings}
"""Tables of the TOML file and the schema whose own fields each holds; the fields of `Settings` stand at its top."""
COMMAND_FIELDS = frozenset({"role"})  # said by the command's name, never by a flag, variable or file


def own_fields(schema: type[Settings]) -> dict[str, FieldInfo]:
    """The schema's fields without those that every process shares, in their order."""
    shared = {} if schema is Settings else Settings.model_fields
    return {n: f for n, f in schema.model_fields.items() if n not in shared and n not in COMMAND_FIELDS}


def flag(name: str) -> str:
    """`--max-batch` of `max_batch`."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """`TWOSTROKE_MAX_BATCH` of `max_batch`."""
    return ENV_PREFIX + name.upper()


def format_bytes(count: int) -> str:
    """1073741824 as '1GiB'; the largest binary unit that divides it."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count and count % 1024**power == 0:
            return f"{count // 1024**power}{unit}"
    return str(count)


def _bounds(field: FieldInfo) -> Iterator[tuple[str, Any]]:
    for mark in field.metadata:
        for name in ("ge", "gt", "le", "lt"):
            if isinstance(mark, getattr(annotated_types, name.capitalize())):
                yield name, getattr(mark, name)


def _range(field: FieldInfo, *, size: bool) -> str:
    bounds = dict(_bounds(field))

    def show(value: Any) -> str:
        return format_bytes(value) if size else f"{value:g}" if isinstance(value, float) else str(value)

    if "ge" in bounds and "le" in bounds:
        return f" from {show(bounds['ge'])} to {show(bounds['le'])}"
    low = f" over {show(bounds['gt'])}" if "gt" in bounds else f" from {show(bounds['ge'])}" if "ge" in bounds else ""
    high = (
        f" up to {show(bounds['le'])}" if "le" in bounds else f" below {show(bounds['lt'])}" if "lt" in bounds else ""
    )
    return low + ("," if low and high else "") + high


def is_flag(field: FieldInfo) -> bool:
    """Whether it is a yes-or-no setting."""
    return field.annotation is bool


def is_list(field: FieldInfo) -> bool:
    """Whether it may be given several times."""
    return get_origin(field.annotation) is list


def kind_of(field: FieldInfo) -> Any:
    """Its type, where None stands for a default that depends on other settings."""
    kind: Any = field.annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(option for option in get_args(kind) if option is not types.NoneType)
    return kind


def takes(field: FieldInfo) -> str:
    """What the field takes, as the end of a sentence: 'a whole number from 1 to 4096'."""
    kind = kind_of(field)
    words = next((mark.text for mark in field.metadata if isinstance(mark, Takes)), None)
    if words == "a size":
        return f"a size{_range(field, size=True)}, such as 512MB or 1GiB"
    if words is not None:
        return words
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(kind))
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + _range(field, size=False)
    return "a path" if issubclass(kind, Path) else "a text that is not empty"


def default_text(field: FieldInfo) -> str:
    """The default as a person would type it; empty where there is none to name."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None and "By device: " in (field.description or ""):
        return "by device"
    if value is None or value in ("", []):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and any(isinstance(mark, Takes) and mark.text == "a size" for mark in field.metadata):
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
