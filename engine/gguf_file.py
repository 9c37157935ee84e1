"""A GGUF file, read with every size checked: the file may be damaged or not what it seems."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import numpy.typing as npt

from ..errors import ConfigError

T = TypeVar("T")
Floats = npt.NDArray[np.float32]
_CHUNK_ELEMENTS = 1 << 20  # dequantised at once: 4 MiB, so that the passes over it stay in the cache


class GgufFile:
    """Typed access to the metadata and the tensors (format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

    Every method raises ConfigError that names the file and what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        """Maps the file and parses its header (1-2 s for a vocabulary of 50,000)."""
        self.path = path
        if not path.is_file():
            raise ConfigError(f"no such GGUF file: {path}")
        try:
            self._reader = gguf.GGUFReader(path, "r")
            self._tensors = {str(tensor.name): tensor for tensor in self._reader.tensors}
        except MemoryError:
            raise
        except Exception as error:  # the reader raises whatever its slicing runs into
            raise self.wrong(f"it is damaged or not in GGUF format ({type(error).__name__}: {error})") from error
        if len(self._tensors) != len(self._reader.tensors):
            raise self.wrong("a tensor's name occurs twice")

    def wrong(self, what: str) -> ConfigError:
        """The error to raise about this file."""
        return ConfigError(f"{self.path}: {what}")

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A metadata value of type `kind`; without a default the key must be there."""
        field = self._reader.fields.get(key)
        if field is None:
            if default is None:
                raise self.wrong(f"metadata key {key} is missing")
            return default
        value: Any = self._contents(key, field)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.wrong(f"metadata key {key} should be of type {kind.__name__}, not {type(value).__name__}")
        return value

    def size(self, key: str, default: int | None = None, *, most: int) -> int:
        """A metadata number between 1 and `most`."""
        value = self.get(key, int, default)
        if not 1 <= value <= most:
            raise self.wrong(f"metadata key {key} is {value}; it should lie between 1 and {most}")
        return value

    def items(self, key: str, kind: type[T]) -> list[T]:
        """A metadata list with items of type `kind`; empty when the key is missing."""
        values = self.get(key, list, [])
        if not all(type(value) is kind for value in values):
            raise self.wrong(f"metadata key {key} should hold {kind.__name__} items only")
        return values

    def has(self, key: str) -> bool:
        """Whether the metadata have this key."""
        return key in self._reader.fields

    @property
    def tensor_names(self) -> set[str]:
        """All tensors' names."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, rows first (GGUF stores it the other way round)."""
        return tuple(int(size) for size in reversed(self._tensor(name).shape))

    def tensor(self, name: str) -> Floats:
        """A whole tensor, dequantised."""
        return self._dequantize(name, self._tensor(name).data).reshape(self.shape(name))

    def rows(self, name: str) -> Iterator[Floats]:
        """A matrix [rows, columns], dequantised, in pieces of about 4 MiB along the rows."""
        data = self._tensor(name).data
        step = max(1, _CHUNK_ELEMENTS // max(1, self.shape(name)[-1]))
        for start in range(0, len(data), step):
            yield self._dequantize(name, data[start : start + step])

    def _tensor(self, name: str) -> Any:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self.wrong(f"tensor {name} is missing")
        return tensor

    def _contents(self, key: str, field: Any) -> Any:
        try:
            return field.contents()
        except Exception as error:  # bad UTF-8, unknown value types
            raise self.wrong(f"metadata key {key} cannot be read ({error})") from error

    def _dequantize(self, name: str, data: Any) -> Floats:
        kind = self._tensor(name).tensor_type
        try:
            values: Floats = np.asarray(gguf.quants.dequantize(data, kind), dtype=np.float32)
        except NotImplementedError as error:
            raise self.wrong(f"tensor {name} has the unsupported type {kind.name}") from error
        except ValueError as error:
            raise self.wrong(f"tensor {name} cannot be read ({error})") from error
        if not np.isfinite(values).all():
            raise self.wrong(f"tensor {name} holds values that are not finite")
        return values
