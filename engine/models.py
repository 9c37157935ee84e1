"""Models by name: a directory, the embedded default, or a hub id."""

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from . import hub
from .embedded import EMBEDDED, ensure_embedded
from .gguf_convert import Progress
from .model_config import ModelConfig
from .model_files import PARTS, SIZES_ONLY, Part, check_layout, fingerprint, read_json, weight_files

__all__ = ["EMBEDDED", "CachedModel", "Progress", "cached", "fingerprint", "read_config", "resolve", "served_name"]
__all__ += ["weight_files"]

_HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model that needs no download."""

    name: str  # what `resolve` takes
    path: Path
    nbytes: int


def resolve(
    name: str,
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    parts: Collection[Part] = PARTS,
) -> Path:
    """The model's directory in the Hugging Face layout, fetched and converted if need be.

    `name`: `smollm2-135m`, a directory, or a hub id `org/name[@revision]`. `cache_dir` None: TWOSTROKE_MODELS_DIR, else
    ~/.cache/twostroke/models (hub models then lie in the hub library's own cache). `parts`: what the caller needs of
    it; of a hub model no more is fetched. Blocks while it downloads, up to minutes.
    Raises ConfigError (field `model` or `models_dir`) with the remedy.
    """
    if name == EMBEDDED:
        return ensure_embedded(_cache_dir(cache_dir), progress)
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):  # which is False, and no error, for names that cannot be a file's
        return check_layout(path, parts)
    if path.suffix == ".gguf" and os.path.isfile(path):
        raise ConfigError(
            f"model {name!r} is a GGUF file: convert it first (twostroke convert {name} DIR)", field="model"
        )
    match = _HUB_ID.fullmatch(name)
    if match is None or name.startswith("."):
        raise ConfigError(
            f"model {name!r} is neither a directory, nor {EMBEDDED}, nor a hub id org/name[@revision]", field="model"
        )
    return hub.fetch(
        match["repository"], match["revision"], cache_dir=_hub_dir(cache_dir), progress=progress, parts=parts
    )


def read_config(name: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> ModelConfig:
    """The configuration of what `resolve` takes, or of a bare `config.json`. Of a hub model no more is fetched."""
    path = Path(os.path.expanduser(name))
    if path.suffix == ".json" and os.path.isfile(path):
        return ModelConfig.from_dicts(read_json(path), {})
    return ModelConfig.from_dir(resolve(name, cache_dir=cache_dir, progress=progress, parts=SIZES_ONLY))


def served_name(name: str) -> str:
    """What clients call the model: a hub id without its revision, a directory's last part."""
    path = os.path.expanduser(name)
    if name != EMBEDDED and os.path.isdir(path):
        return Path(path).resolve().name
    return name.partition("@")[0]


def cached(cache_dir: Path | None = None) -> list[CachedModel]:
    """The models that `resolve` finds without a download, by name. The sizes are those on disk, in bytes."""
    home = _cache_dir(cache_dir) / EMBEDDED
    found = [CachedModel(EMBEDDED, home, _size(home))] if home.is_dir() else []
    return found + [CachedModel(name, path, _size(path)) for name, path in hub.snapshots(_hub_dir(cache_dir))]


def _cache_dir(given: Path | None) -> Path:
    chosen = given or os.environ.get("TWOSTROKE_MODELS_DIR")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "twostroke" / "models"


def _hub_dir(given: Path | None) -> Path | None:
    """Hub models share the cache of other programs, unless a place was asked for."""
    chosen = given or os.environ.get("TWOSTROKE_MODELS_DIR")
    return Path(chosen).expanduser() / "hub" if chosen else None


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
