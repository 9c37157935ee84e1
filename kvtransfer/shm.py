"""A pool of KV pages in a mapped file: the decode worker makes it, prefill workers of the same host map it and write.

A file of a directory of one's choice, not `multiprocessing.shared_memory`: Python 3.11's unlinks a segment when any
attached process ends.
"""

import errno
import fcntl
import mmap
import os
import re
import stat
import struct
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigError, Mismatch, TwostrokeError, Unavailable

HEADER_BYTES = 4096  # a page of its own, so that the pool starts aligned
_HEADER = struct.Struct("<8sQQ")  # magic, incarnation, bytes of the pool
_MAGIC = b"2strkKV1"
_NAME = re.compile(r"twostroke-[0-9a-f]{16}\.kv")
_MAX_PATH = 4096
_CREATE_TRIES = 8
_PIECE_BYTES = 16 << 20
_MADV_POPULATE_WRITE = 23  # madvise(2); Linux 5.14
_TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)


class SharedPool:
    """A mapping of a pool's file; the owner's also holds the file's lock and removes the file when closed.

    The lock tells live pools from those that dead processes left: see `sweep`. The memory is given back when the last
    process unmaps it. `close` unmaps at once unless tensors over the mapping are alive; then the last of them does.
    """

    kind = "shm"

    def __init__(self, path: Path, descriptor: int | None, mapping: mmap.mmap, nbytes: int) -> None:
        """Use `create` or `open`. `descriptor`: the owner's locked file."""
        self._path = path
        self._descriptor = descriptor
        self._tensor: Tensor | None = torch.frombuffer(mapping, dtype=torch.uint8, offset=HEADER_BYTES, count=nbytes)
        self.nbytes = nbytes

    @classmethod
    def create(cls, directory: Path, nbytes: int, *, incarnation: int) -> "SharedPool":
        """Makes, locks and maps a zeroed file of `nbytes` (> 0) and a header.

        Raises ConfigError when the directory cannot hold it: found out now, as later a full one would be a SIGBUS.
        """
        if nbytes <= 0:
            raise ValueError(f"a pool needs at least one byte, not {nbytes}")
        path = directory.absolute() / file_name(incarnation)
        try:
            descriptor = _create_locked(path)
        except OSError as error:
            raise ConfigError(f"cannot make a pool in {directory}: {error.strerror}", field="shm_dir") from error
        try:
            os.posix_fallocate(descriptor, 0, HEADER_BYTES + nbytes)
            os.pwrite(descriptor, _HEADER.pack(_MAGIC, incarnation, nbytes), 0)
            mapping = _map(descriptor, nbytes)
        except OSError as error:
            _remove(path, descriptor)
            raise ConfigError(
                f"{directory} has no room for {nbytes / 2**20:.0f} MiB of KV pages ({error.strerror}); "
                "lower kv_memory or choose another shm_dir",
                field="shm_dir",
            ) from error
        return cls(path, descriptor, mapping, nbytes)

    @classmethod
    def open(cls, descriptor: bytes, *, incarnation: int, nbytes: int) -> "SharedPool":
        """Maps the pool that `descriptor` (another process's `SharedPool.descriptor`) names; about 0.4 s a GiB.

        Raises Mismatch unless it is that incarnation's pool of just `nbytes`, of this user; Unavailable where this
        process lacks descriptors or memory at present.
        """
        path = _checked_path(descriptor, incarnation)
        try:
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _unreachable(f"cannot open the peer's pool {path}: {error.strerror}", error) from error
        try:
            _check_file(handle, incarnation, nbytes)
            mapping = _map(handle, nbytes)
        except (OSError, ValueError) as error:
            raise _unreachable(f"cannot map the peer's pool {path}: {error}", error) from error
        finally:
            os.close(handle)
        return cls(path, None, mapping, nbytes)

    @property
    def tensor(self) -> Tensor:
        """The pool, flat: [nbytes] uint8, aligned to a memory page. Raises ValueError once closed."""
        if self._tensor is None:
            raise ValueError("the pool is closed")
        return self._tensor

    @property
    def descriptor(self) -> bytes:
        """What `open` needs in another process of this host (that sees the same directory at the same path)."""
        return os.fsencode(self._path)

    def close(self) -> None:
        """Gives the mapping back, and removes the owner's file. May be called again."""
        self._tensor = None  # holds the mapping, which ends with the last tensor over it: never by mmap.close()
        if self._descriptor is not None:
            _remove(self._path, self._descriptor)
            self._descriptor = None


def file_name(incarnation: int) -> str:
    """Name of the file of that incarnation's pool."""
    return f"twostroke-{incarnation:016x}.kv"


def sweep(directory: Path) -> int:
    """Removes this user's pool files whose owners are dead (nobody holds their lock); returns their number."""
    removed = 0
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                removed += _sweep_file(Path(entry.path))
    return removed


def _sweep_file(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # another user's, or gone meanwhile
        return False
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _names(path, handle):
            return False
        path.unlink()
        return True
    except OSError:  # locked: its owner lives
        return False
    finally:
        os.close(handle)


def _map(handle: int, nbytes: int) -> mmap.mmap:
    """Populated: a page fault in the middle of a step or a push costs several microseconds for each 4 KiB.

    Piece by piece: `mmap` and `madvise` keep the interpreter's lock, and 16 GiB at once would silence this process for
    so long that its peers take it for frozen.
    """
    mapping = mmap.mmap(handle, HEADER_BYTES + nbytes, flags=mmap.MAP_SHARED)
    _populate(mapping)
    return mapping


def _populate(mapping: mmap.mmap) -> None:
    try:
        for start in range(0, len(mapping), _PIECE_BYTES):
            mapping.madvise(_MADV_POPULATE_WRITE, start, min(_PIECE_BYTES, len(mapping) - start))
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel: pages are mapped when they are first touched
            raise


def _unreachable(text: str, error: Exception) -> TwostrokeError:
    """Mismatch is for good: the two never try again. What this process lacks for a moment must not come to that."""
    transient = isinstance(error, OSError) and error.errno in _TRANSIENT
    return Unavailable(text) if transient else Mismatch(text)


def _create_locked(path: Path) -> int:
    for _ in range(_CREATE_TRIES):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if _names(path, handle):
            return handle
        os.close(handle)  # a sweep locked it before us and took it for a dead one's
    raise OSError(0, "its files are removed by others")


def _names(path: Path, handle: int) -> bool:
    """Whether `path` still leads to this open file."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False


def _remove(path: Path, handle: int) -> None:
    """Removes the owner's file unless the name has passed to another, and drops the lock."""
    try:
        if _names(path, handle):
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _checked_path(descriptor: bytes, incarnation: int) -> Path:
    """The path in a peer's message, which is not to be trusted: it must at least be named as that peer's pool."""
    path = Path(os.fsdecode(descriptor[: _MAX_PATH + 1]))
    if (
        len(descriptor) > _MAX_PATH
        or b"\0" in descriptor
        or not path.is_absolute()
        or ".." in path.parts
        or path.name != file_name(incarnation)
    ):
        raise Mismatch(f"not a path of the pool of {incarnation:016x}: {descriptor[:200]!r}")
    return path


def _check_file(handle: int, incarnation: int, nbytes: int) -> None:
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        raise Mismatch("the peer's pool is not a regular file")
    if status.st_uid != os.geteuid():
        raise Mismatch(f"the peer's pool belongs to user {status.st_uid}, not to {os.geteuid()}")
    if status.st_size != HEADER_BYTES + nbytes:
        raise Mismatch(f"the peer's pool has {status.st_size} bytes, expected {HEADER_BYTES + nbytes}")
    header = _HEADER.unpack(os.pread(handle, _HEADER.size, 0))
    if header != (_MAGIC, incarnation, nbytes):
        raise Mismatch(f"the peer's pool has another header: {header}")
