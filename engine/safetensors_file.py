"""The safetensors format, as much as is needed to write a large file piece by piece and to look into one.

Format: 8 bytes of little-endian header length, a JSON header, the tensors' bytes
(https://huggingface.co/docs/safetensors). No torch: the gateway looks into models, too.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_MAX_HEADER = 100_000_000  # bytes; the reference implementation's own bound


class TensorSpec(NamedTuple):
    """A tensor to write."""

    name: str
    dtype: str  # in the format's spelling: F32, BF16, ...
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class StoredTensor(NamedTuple):
    """A tensor found in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # offset of the first byte in the file
    nbytes: int


def write_safetensors(path: Path, specs: Sequence[TensorSpec], pieces: Iterable[bytes | memoryview]) -> None:
    """Writes the tensors in the order of `specs`; `pieces` are their bytes, cut anywhere.

    The file appears whole, and is on disk when it returns.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            written = sum(file.write(piece) for piece in pieces)
            if written != end:
                raise ValueError(f"{path}: {written} bytes written where the header tells of {end}")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. ConfigError when it is damaged or cut off."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise ValueError("its header is cut off")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        return {name: _stored(entry, 8 + length, size) for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error


def _stored(entry: dict[str, object], base: int, size: int) -> StoredTensor:
    """One entry of the header, checked against the file's size."""
    begin, end = entry["data_offsets"]  # type: ignore[misc]
    shape = tuple(int(n) for n in entry["shape"])  # type: ignore[attr-defined]
    if not 0 <= begin <= end <= size - base:  # type: ignore[has-type]
        raise ValueError("it is cut off")
    return StoredTensor(str(entry["dtype"]), shape, base + begin, end - begin)  # type: ignore[has-type]
