"""The gateway's end of a `grammar_child` process."""

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

from ...engine.request import Constraint
from ...errors import ConfigError, TwostrokeError

START_S = 60.0  # for Python, the libraries and the vocabulary
COMPILE_S = 5.0
MAX_LINE = 64 << 10  # bytes of an answer
CHILD = f"{__package__}.grammar_child"


class GrammarProcess:
    """Started when first asked, killed when it takes too long; one question at a time."""

    def __init__(self, folder: Path, *, compile_s: float = COMPILE_S) -> None:
        """`folder`: the model's."""
        self._folder = folder
        self._compile_s = compile_s
        self._process: asyncio.subprocess.Process | None = None

    async def verdict(self, constraint: Constraint) -> str:
        """Why it cannot be used; empty: it can. TwostrokeError where no process could be started.

        When it is cancelled, or over time, the process is killed.
        """
        process = await self._ready()
        question = json.dumps({"kind": int(constraint.kind), "text": constraint.text}) + "\n"
        try:
            async with asyncio.timeout(self._compile_s):
                answer = await self._ask(process, question.encode())
        except TimeoutError:
            await self.kill()
            return f"the constraint cannot be used: it takes longer than {self._compile_s:g} s to compile"
        except (OSError, ValueError, EOFError):
            await self.kill()
            return "the constraint cannot be used: it is too large or too deeply nested"
        except BaseException:
            await self.kill()
            raise
        return answer

    async def _ready(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self.kill()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", CHILD, str(self._folder), str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # a library's last words may hold what a request says
                limit=MAX_LINE,
                start_new_session=True,
            )  # fmt: skip
            async with asyncio.timeout(START_S):
                problem = await self._read(process)
        except BaseException as error:
            await self.kill()
            if isinstance(error, OSError | TimeoutError | ValueError | EOFError):
                raise TwostrokeError("the process that compiles constraints could not be started") from error
            raise
        if problem:
            await self.kill()
            raise ConfigError(problem)
        return process

    async def _ask(self, process: asyncio.subprocess.Process, question: bytes) -> str:
        if process.stdin is None:
            raise EOFError
        process.stdin.write(question)
        await process.stdin.drain()
        return await self._read(process)

    async def _read(self, process: asyncio.subprocess.Process) -> str:
        line = await process.stdout.readline() if process.stdout is not None else b""
        if not line.endswith(b"\n"):
            raise EOFError
        return str(json.loads(line)["error"])

    async def kill(self) -> None:
        """Ends it at once."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.shield(process.wait())
