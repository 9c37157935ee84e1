"""Reads request bodies into typed fields; what is wrong, unknown or not supported is refused by name."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError

from .errors import HttpRefusal

F = TypeVar("F", bound="Fields")
T = TypeVar("T")


class _First(FailFast):
    """Usable in a union, which hashes."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


Many: TypeAlias = Annotated[T, _First()]
"""A list or object of a client's: one error is told of it, and all of half a million would take a second to gather."""
MAX_NAME = 64  # characters of a client's own field name that are repeated to it


class Fields(BaseModel):
    """Of a JSON object. Null is as good as absent."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        hide_input_in_errors=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields of the API that cannot be honoured, each with the values that ask for nothing."""
    remedies: ClassVar[Mapping[str, str]] = {}
    """What to do instead, of those where that is more than leaving them out."""

    @classmethod
    def read(cls: type[F], value: Any, path: str = "") -> F:
        """HttpRefusal that names the first field that is wrong. `path`: of the object in the body, with a dot."""
        if not isinstance(value, dict):
            where = path.rstrip(".") or None
            raise HttpRefusal(f"{where or 'the body'} must be a JSON object", field=where, code="invalid_type")
        try:
            return cls.model_validate(cls._supported(value, path))
        except ValidationError as error:
            raise _readable(error, path) from None

    @classmethod
    def names(cls) -> set[str]:
        """What clients call the fields."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @classmethod
    def _supported(cls, value: dict[str, Any], path: str) -> dict[str, Any]:
        kept, names = {}, cls.names()
        unknown = 0
        for name, given in value.items():
            if name not in names and name not in cls.unsupported:
                unknown += 1
                if unknown > 1:  # the first one is told
                    continue
            if name in cls.unsupported:
                if given is not None and not any(_same(given, harmless) for harmless in cls.unsupported[name]):
                    told = _not_supported(path + name, cls.unsupported[name], cls.remedies.get(name))
                    raise HttpRefusal(told, field=path + name, code="unsupported_parameter")
            elif given is not None or name not in names:
                kept[name] = given
        return kept


def _same(given: Any, harmless: Any) -> bool:
    """1 is not true, though Python takes them for equal."""
    return type(given) is type(harmless) and bool(given == harmless)


def _not_supported(name: str, harmless: tuple[Any, ...], remedy: str | None) -> str:
    if remedy is not None:
        return f"{name} is not supported here: {remedy}"
    if not harmless:
        return f"{name} is not supported here: leave it out"
    return f"this {name} is not supported here: leave it out, or send {harmless[0]!r}"


def _readable(error: ValidationError, path: str) -> HttpRefusal:
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = path + _path(problem["loc"])
    if problem["type"] == "extra_forbidden":
        shown = name if len(name) <= MAX_NAME else name[:MAX_NAME] + "..."
        return HttpRefusal(f"there is no field {shown!r} here", field=shown, code="unknown_parameter")
    if problem["type"] == "missing":
        return HttpRefusal(f"{name} is missing", field=name, code="missing_required_parameter")
    text = problem["msg"].removeprefix("Value error, ")
    return HttpRefusal(f"{name}: {text[:1].lower()}{text[1:]}", field=name)


def _path(parts: tuple[int | str, ...]) -> str:
    """('stop', 3) as stop[3]."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
