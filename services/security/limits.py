"""What one tenant may have: as a line of the file of keys, a token or the settings say it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_AT_ONCE = 1_000_000
MOST_PER_MINUTE = 1_000_000_000
LEAST_URGENT = (1 << 31) - 1
MOST_URGENT = -(1 << 31)
"""Priorities are whole numbers of 32 bits; lower ones go first."""

RANGES: Mapping[str, tuple[int, int]] = {
    "max_requests": (0, MOST_AT_ONCE),
    "requests_per_minute": (0, MOST_PER_MINUTE),
    "input_tokens_per_minute": (0, MOST_PER_MINUTE),
    "output_tokens_per_minute": (0, MOST_PER_MINUTE),
    "priority": (MOST_URGENT, LEAST_URGENT),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """None: nothing is said. 0 (of `priority` None): no limit.

    `max_requests`: answers at once. `priority`: the most urgent (lowest) one that may be asked for.
    """

    max_requests: int | None = None
    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    priority: int | None = None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Limits":
        """Of JSON; names that are not limits are left out. ValueError where a value is out of its range."""
        found = {name: values[name] for name in RANGES if values.get(name) is not None}
        for name, value in found.items():
            least, most = RANGES[name]
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"{name} takes a whole number from {least} to {most}")
        return cls(**found)

    def said(self) -> dict[str, int]:
        """What is said, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def over(self, other: "Limits") -> "Limits":
        """These; what they do not say is `other`'s."""
        return Limits(**{**other.said(), **self.said()})


UNLIMITED = Limits()
