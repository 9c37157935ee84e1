"""A file that may be replaced while the process runs: read again when it has changed, at most each second, on use."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from ...errors import ConfigError

LOOK_S = 1.0  # between two looks: what was replaced counts after that
MAX_BYTES = 4 << 20

T = TypeVar("T")
Stamp = tuple[int, int, int, int]

logger = logging.getLogger(__name__)


def read_bounded(path: Path, field: str) -> bytes:
    """The whole file. ConfigError, naming the setting `field`, where it cannot be read or is too large."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{field}: cannot read {path}: {error.strerror}", field=field) from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{field}: {path} is larger than {MAX_BYTES >> 20} MiB", field=field)
    return content


class WatchedFiles(Generic[T]):
    """What several files make together. Any thread may ask; a reader that loses a race reads once more than needed."""

    def __init__(
        self,
        paths: dict[str, Path],
        parse: Callable[[dict[str, bytes]], T],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`paths`: by the setting that named each. ConfigError, `parse`'s or ours, where the files will not do."""
        self._paths = paths
        self._parse = parse
        self._clock = clock
        self._stamps = self._stat()
        self._value = self._read()
        self._looked = clock()

    def get(self) -> T:
        """The newest value that could be read. A replacement that is no good is logged once; the old value stays."""
        now = self._clock()
        if now - self._looked < LOOK_S:
            return self._value
        self._looked = now
        stamps = self._stat()
        if stamps == self._stamps:
            return self._value
        self._stamps = stamps
        try:
            self._value = self._read()
        except ConfigError as error:
            logger.error("%s; what was read before stays in force", error.message)
        else:
            logger.info("read again: %s", ", ".join(str(path) for path in self._paths.values()))
        return self._value

    def _read(self) -> T:
        return self._parse({field: read_bounded(path, field) for field, path in self._paths.items()})

    def _stat(self) -> list[Stamp | None]:
        return [_stamp(path) for path in self._paths.values()]


def _stamp(path: Path) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev
