"""Rules, in llguidance's Lark, of calls as Python writes them: name(argument=value, ...)."""

from collections.abc import Callable, Mapping
from typing import Any

from .python_text import lark, string
from .python_values import TERMINALS, PythonValues
from .schema import SchemaReader
from .wish import Function, ToolWish


def write_calls(wish: ToolWish, parameters: Callable[[Function, ToolWish], Mapping[str, Any]]) -> list[str]:
    """`call`, and for each function `call_N` and `arguments_N`, what stands between its parentheses. InvalidRequest
    (field `tools`) where no call satisfies a function's parameters, or they cannot be kept and it is strict."""
    told = ["call: " + " | ".join(f"call_{index}" for index in range(len(wish.functions)))]
    for index, function in enumerate(wish.functions):
        lenient = not function.strict
        reader = SchemaReader(parameters(function, wish), function.name, lenient=lenient)
        values = PythonValues(reader, f"py_{index}_", lenient=lenient)
        arguments = values.arguments(parameters(function, wish))
        if arguments is None:
            raise reader.refusal("no call can satisfy them")
        told += [
            f'call_{index}: {lark(function.name + "(")} arguments_{index} ")"',
            f"arguments_{index}: {arguments or lark('')}",
            *values.rules,
        ]
    return [*told, f"PY_STRING: /{string()}/", *TERMINALS]
