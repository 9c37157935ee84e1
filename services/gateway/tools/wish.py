"""Which functions a model may call, and whether it must."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Function:
    """`definition`: as the chat template takes it. `strict`: its arguments keep to `parameters`, a JSON Schema."""

    name: str
    definition: Mapping[str, Any]
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolWish:
    """`shown`: all functions, as the model is told of them. `functions`: those that it may call now. `required`: it
    must, at once. `single`: once at most."""

    shown: tuple[Mapping[str, Any], ...]
    functions: tuple[Function, ...]
    required: bool = False
    single: bool = False

    @property
    def names(self) -> frozenset[str]:
        """Of the functions that may be called."""
        return frozenset(function.name for function in self.functions)

    @property
    def constrained(self) -> bool:
        """Whether the model is to be held to it; else it is asked, and its text is read."""
        few = len(self.functions) < len(self.shown)
        return self.required or self.single or few or any(function.strict for function in self.functions)
