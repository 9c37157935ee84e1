"""The gateway's end of a `grammar_child` process."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

from ...engine.request import Constraint
from ...errors import ConfigError, TwostrokeError

log = logging.getLogger(__name__)

START_S = 60.0  # for Python, the libraries and the vocabulary
COMPILE_S = 5.0
MAX_LINE = 64 << 10  # bytes of an answer
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}  # each arena would take of the memory that it may have
CHILD = f"{__package__}.grammar_child"


class GrammarProcess:
    """Started when first asked, killed when it takes too long; one question at a time."""

    def __init__(self, folder: Path, *, compile_s: float = COMPILE_S) -> None:
        """`folder`: the model's."""
        self._folder = folder
        self._compile_s = compile_s
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def verdict(self, constraint: Constraint) -> str:
        """Why it cannot be used; empty: it can. TwostrokeError where no process could be started, ConfigError where
        nothing can be used with this model.

        When it is cancelled, or over time, the process is killed.
        """
        if self._process is None or self._process.poll() is not None:  # somebody may have ended it
            await self._start()
        question = json.dumps({"kind": int(constraint.kind), "text": constraint.text}) + "\n"
        try:
            async with asyncio.timeout(self._compile_s):
                return await self._ask(question.encode())
        except TimeoutError:
            await self.kill()
            return f"the constraint cannot be used: it takes longer than {self._compile_s:g} s to compile"
        except (OSError, ValueError, EOFError):
            await self.kill()
            return "the constraint cannot be used: it is too large or too deeply nested"
        except BaseException:
            await self.kill()
            raise

    async def _start(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                await self.kill()
                await self._spawn()
                problem = await self._ask(b"")
        except BaseException as error:
            code = await self.kill()
            if not isinstance(error, OSError | TimeoutError | ValueError | EOFError):
                raise
            log.error("the process that compiles constraints could not be started: %r (exit code %s)", error, code)
            raise TwostrokeError("the process that compiles constraints could not be started") from error
        if problem:
            await self.kill()
            raise ConfigError(problem)

    async def _spawn(self) -> None:
        """By `subprocess`, whose child never runs between fork and exec: gRPC's handlers of a fork would crash it."""
        ours, theirs = socket.socketpair()
        with theirs:
            command, end = [sys.executable, "-m", CHILD, str(self._folder), str(os.getpid())], theirs.fileno()
            try:
                self._process = subprocess.Popen(  # noqa: ASYNC220
                    command, stdin=end, stdout=end, start_new_session=True, env={**os.environ, **_ENVIRONMENT}
                )
            except OSError:
                ours.close()
                raise
        try:
            self._streams = await asyncio.open_connection(sock=ours, limit=MAX_LINE)
        except BaseException:
            ours.close()
            raise

    async def _ask(self, question: bytes) -> str:
        if self._streams is None:
            raise EOFError
        reader, writer = self._streams
        writer.write(question)
        await writer.drain()
        line = await reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return str(json.loads(line)["error"])

    async def kill(self) -> int | None:
        """Ends it at once. Returns its exit code."""
        process, streams = self._process, self._streams
        self._process = self._streams = None
        if streams is not None:
            streams[1].close()
        if process is None:
            return None
        process.kill()
        return await asyncio.shield(asyncio.to_thread(process.wait))
