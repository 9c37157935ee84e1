"""The files that a router needs to tokenize as the gateway does: a zip archive, the same each time."""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path

from ....errors import WrongState
from ....smg import common_pb2 as pb

CHUNK_BYTES = 64 << 10
MAX_BYTES = 256 << 20  # of all files; the largest tokenizers have a tenth of it
NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.json",
    "chat_template.jinja",
)
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first time that a zip archive can tell


class TokenizerFiles:
    """Packed when they are first asked for, on a thread, and kept."""

    def __init__(self, folder: Path, threads: Executor) -> None:
        self._folder = folder
        self._threads = threads
        self._packing: asyncio.Future[bytes] | None = None

    async def chunks(self) -> Iterator[pb.GetTokenizerChunk]:
        """In order; the last one has the digest of all. WrongState where there is nothing to send."""
        if self._packing is None or (self._packing.done() and self._packing.exception() is not None):
            self._packing = asyncio.get_running_loop().run_in_executor(self._threads, pack, self._folder)
        return split(await asyncio.shield(self._packing))


def pack(folder: Path) -> bytes:
    """The archive."""
    paths = [path for name in NAMES if (path := folder / name).is_file()]
    if not paths or sum(path.stat().st_size for path in paths) > MAX_BYTES:
        raise WrongState("the model's folder has no tokenizer files to send, or too large ones")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in paths:
            archive.writestr(zipfile.ZipInfo(path.name, _EPOCH), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def split(archive: bytes) -> Iterator[pb.GetTokenizerChunk]:
    """In pieces, the last one with the digest."""
    for start in range(0, len(archive), CHUNK_BYTES):
        last = start + CHUNK_BYTES >= len(archive)
        digest = hashlib.sha256(archive).hexdigest() if last else ""
        yield pb.GetTokenizerChunk(data=archive[start : start + CHUNK_BYTES], sha256=digest)
