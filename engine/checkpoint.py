"""A model directory's safetensors files as one: which tensor is where, and whether it is what the decoder needs."""

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
PREFIXES: tuple[Mapping[str, str], ...] = (
    {"model.": "model.", "lm_head.": "lm_head."},
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},  # transformers 4, text part
    {"model.": "model.language_model.", "lm_head.": "lm_head."},  # transformers 5, text part
)
_LAYER = re.compile(r".*\blayers\.\d+\.")
_IGNORED = ("rotary_emb.inv_freq",)  # constants that old checkpoints carry


class Checkpoint:
    """The open safetensors files of a directory: which tensor is where."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        """`stack` closes the files. Raises ConfigError for a file that cannot be read."""
        self._path = path
        self._where: dict[str, Any] = {}
        for name in _file_names(path):
            try:
                handle = stack.enter_context(safe_open(path / name, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path / name} cannot be read: {error}", field="model") from error
            self._where.update(dict.fromkeys(handle.keys(), handle))
        self._prefixes = next((p for p in PREFIXES if p["model."] + "embed_tokens.weight" in self._where), PREFIXES[0])

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ConfigError unless each name is there in its shape, and nothing else that would matter."""
        wrong = []
        for name, shape in expected.items():
            stored = self._stored(name)
            if stored not in self._where:
                wrong.append(f"{stored} is missing")
                continue
            slice_ = self._where[stored].get_slice(stored)
            if (found := tuple(slice_.get_shape())) != shape:
                wrong.append(f"{stored} is {list(found)}, not {list(shape)}")
            elif slice_.get_dtype() not in FLOATS:
                wrong.append(f"{stored} is {slice_.get_dtype()}, not one of {', '.join(FLOATS)}")
        wrong += [f"{name} has no place in it" for name in self._strangers(expected)]
        if wrong:
            rest = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise ConfigError(f"{self._path} does not fit its config.json: {', '.join(wrong[:5])}{rest}", field="model")

    def read(self, name: str) -> Tensor:
        """A tensor by the decoder's name for it; it may be a view of the mapped file."""
        stored = self._stored(name)
        tensor: Tensor = self._where[stored].get_tensor(stored)
        return tensor

    def _stored(self, name: str) -> str:
        """A tensor's name in the files, where the decoder may be a part of something larger."""
        prefix = next((p for p in self._prefixes if name.startswith(p)), "")
        return self._prefixes.get(prefix, "") + name[len(prefix) :]

    def _strangers(self, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Tensors inside of known layers that the decoder would ignore: a bias, a norm, a scale."""
        known = {self._stored(name) for name in expected}
        layers = {m[0] for name in known if (m := _LAYER.match(name))}
        return sorted(
            name
            for name in self._where
            if name not in known and (m := _LAYER.match(name)) and m[0] in layers and not name.endswith(_IGNORED)
        )


def _file_names(path: Path) -> list[str]:
    if (path / INDEX).exists():
        try:
            names = set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path / INDEX} cannot be read: {error!r}", field="model") from error
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise ConfigError(f"{path / INDEX} names files outside its directory", field="model")
        return sorted(names)
    if (path / SINGLE).exists():
        return [SINGLE]
    raise ConfigError(f"{path} has neither {SINGLE} nor {INDEX}", field="model")
