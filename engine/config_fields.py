"""Checked reading of the fields of a `config.json`."""

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError


class Fields:
    """A JSON object of a model's configuration. Whatever is wrong is a ConfigError that names the field."""

    def __init__(self, values: Mapping[str, Any], at: str = "") -> None:
        """`at`: the path of the object in the file, with a dot at its end."""
        self._values = values
        self._at = at

    def get(self, field: str, default: Any = None) -> Any:
        """As it stands; `default` where it is absent (a null is no absence)."""
        return self._values.get(field, default)

    def __contains__(self, field: str) -> bool:
        return field in self._values

    def __iter__(self) -> Any:
        return iter(self._values)

    def below(self, field: str) -> "Fields | None":
        """The object in a field; None where it is absent, null or empty."""
        value = self._values.get(field)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(field, "an object")
        return Fields(value, f"{self._at}{field}.") if value else None

    def size(self, field: str, default: int | None = None) -> int:
        """A positive integer. Null counts as absent."""
        value = self._or(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(field, "a positive integer")
        return value

    def positive(self, field: str, default: float | None = None) -> float:
        """A positive number. Null counts as absent."""
        value = self._or(field, default)
        if not is_number(value) or not 0 < value < float("inf"):
            raise self.wrong(field, "a positive number")
        return float(value)

    def maybe_size(self, field: str) -> int:
        """A positive integer, or 0 where it is absent or null."""
        return self.size(field) if self.get(field) is not None else 0

    def maybe_positive(self, field: str) -> float:
        """A positive number, or 0.0 where it is absent or null."""
        return self.positive(field) if self.get(field) is not None else 0.0

    def flag(self, field: str, default: bool = False) -> bool:
        """A truth value. Null counts as absent."""
        value = self._or(field, default)
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    def wrong(self, field: str, takes: str) -> ConfigError:
        """The error for a value that cannot be used."""
        got = self._values.get(field)
        return ConfigError(f"config.json: {self._at}{field} is {got}; supported: {takes}", field="model")

    def _or(self, field: str, default: Any) -> Any:
        value = self._values.get(field)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"config.json lacks {self._at}{field}", field="model")
        return value


def is_number(value: Any) -> bool:
    """Whether it is a JSON number."""
    return isinstance(value, int | float) and not isinstance(value, bool)
