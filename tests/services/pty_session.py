"""A command of ours in a pseudo terminal, driven by a test: types, waits for what it shows."""

import asyncio
import contextlib
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PATIENCE_S = 30.0
AGAIN_S = 3.0
_TAKE_TERMINAL = (
    "import fcntl, os, signal, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "  # a shell has what it runs in the background ignore it
    "os.execv(sys.executable, [sys.executable, '-m', 'twostroke.services.cli', *sys.argv[1:]])"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\x07")


class PtySession:
    """What it showed is in `text`, without escape sequences."""

    def __init__(self, master: int, process: asyncio.subprocess.Process) -> None:
        self._master, self.process = master, process
        self._raw = b""
        self._from = 0  # of `text`: what was waited for lies before
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(master, self._read)

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self._raw.decode("utf-8", "replace"))

    def _read(self) -> None:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._master)
        self._raw += data
        self._changed.set()

    def type(self, text: str) -> None:
        r"""Keys: \x03 is Ctrl-C, \x04 Ctrl-D."""
        os.write(self._master, text.encode())

    async def see(self, words: str, within_s: float = PATIENCE_S) -> None:
        """Waits until it shows this, after what was seen before."""
        try:
            async with asyncio.timeout(within_s):
                while (at := self.text.find(words, self._from)) < 0:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{words!r} did not come; seen: {self.text!r}") from None
        self._from = at + len(words)

    async def interrupt(self, words: str) -> None:
        """Ctrl-C until it shows this: Python may miss one that comes while `input` is about to wait for a key."""
        for _ in range(int(PATIENCE_S / AGAIN_S)):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                await self.see(words, AGAIN_S)
                return
        raise AssertionError(f"Ctrl-C did nothing; seen: {self.text!r}")

    async def ends(self) -> int:
        """Its exit code."""
        return await asyncio.wait_for(self.process.wait(), PATIENCE_S)


@asynccontextmanager
async def on_terminal(*words: str, term: str = "dumb") -> AsyncIterator[PtySession]:
    """Runs `twostroke WORDS` with the terminal as its own; kills it at the end if it still runs."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": term, "COLUMNS": "200"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _TAKE_TERMINAL, *words, stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    session = PtySession(master, process)
    try:
        yield session
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()
        asyncio.get_running_loop().remove_reader(master)
        os.close(master)
