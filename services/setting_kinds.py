"""What settings are made of, for the files that declare some."""

import dataclasses
from typing import Annotated

from pydantic import BeforeValidator
from pydantic_settings import NoDecode


@dataclasses.dataclass(frozen=True, slots=True)
class Takes:
    """Says in words what a field takes, where its type and bounds do not."""

    text: str


def parse_list(value: object) -> object:
    """'a,b' or a list whose elements may hold commas, as a list of non-empty strings."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        return value
    return [piece.strip() for part in parts for piece in part.split(",") if piece.strip()]


Names = Annotated[list[str], BeforeValidator(parse_list), NoDecode, Takes("names, separated by commas")]
