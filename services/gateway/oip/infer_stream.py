"""One call of ModelStreamInfer: many requests side by side, their answers one after the other on one stream."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from ....errors import DeadlineExceeded, Overloaded, TwostrokeError
from ....oip import grpc_service_pb2 as pb
from ...interceptor import code_of, unexpected
from ..guard import SlowReader
from .reply import FINAL, Reply
from .request import check_id

MAX_IN_FLIGHT = 256  # requests of a stream; one more is refused
LAST_WORDS_S = 1.0  # for the ends of all requests to leave before the status of a call that fails
METHOD = "ModelStreamInfer"

Message: TypeAlias = pb.ModelStreamInferResponse
Write: TypeAlias = Callable[[pb.ModelInferResponse], Awaitable[None]]
Run: TypeAlias = Callable[[pb.ModelInferRequest, Write, Callable[[Reply], None]], Awaitable[None]]
"""Runs a request: `Write` takes its responses; the last argument is told of a reply that is given piece by piece."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A message on its way; whoever wrote it waits for `sent`."""

    message: Message
    sent: asyncio.Future[None]


class InferStream:
    """Reads, runs and writes until the client has closed its side and all is answered. Whatever ends it ends every
    request: a cancel, the deadline, a client that does not read (SlowReader)."""

    def __init__(
        self,
        run: Run,
        send: Callable[[Message], Awaitable[None]],
        *,
        slow_reader_s: float,
        keep_alive_s: float,
        idle_s: float = math.inf,
    ) -> None:
        """`send`: writes to the call. `slow_reader_s`: the longest that the telling of an error may take.
        `keep_alive_s`: of silence, until a sign of life is given for an answer under way; 0: none is. `idle_s`: the
        longest that the next request may let itself be waited for while none is in flight."""
        self._run = run
        self._send = send
        self._slow_reader_s = slow_reader_s
        self._keep_alive_s = keep_alive_s
        self._idle_s = idle_s
        self._reading: asyncio.Timeout | None = None  # while requests may come
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()  # no longer than requests are in flight, and one
        self._in_flight = 0
        self._replies: dict[Reply, None] = {}  # that are given piece by piece, oldest first
        self._begun = False  # something was written
        self._cut: list[str] = []  # ids of requests that ended without an answer

    async def serve(self, requests: AsyncIterator[pb.ModelInferRequest]) -> None:
        """Raises what ends the call as a whole."""
        try:
            async with asyncio.TaskGroup() as writing:
                pump = writing.create_task(self._pump())
                try:
                    async with asyncio.TaskGroup() as running:
                        await self._read(requests, running)
                except BaseExceptionGroup as errors:
                    await self._last_words(first(errors))
                    raise
                pump.cancel()
        except BaseExceptionGroup as errors:
            raise first(errors) from None

    async def _read(self, requests: AsyncIterator[pb.ModelInferRequest], running: asyncio.TaskGroup) -> None:
        """Begins each request as it comes, until the client closes its side. DeadlineExceeded where none comes."""
        scope = self._reading = asyncio.timeout(None)
        try:
            async with scope:
                self._expect(self._idle_s)
                async for request in requests:
                    self._expect(math.inf)
                    if self._in_flight >= MAX_IN_FLIGHT:
                        full = f"{MAX_IN_FLIGHT} requests of this stream are being served already"
                        await self._tell(request.id, Overloaded(full, retry_after_s=1.0))
                        continue
                    self._in_flight += 1
                    running.create_task(self._answer(request))
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineExceeded(f"no request came for {self._idle_s:g} s") from None
        finally:
            self._reading = None

    def _expect(self, seconds: float) -> None:
        """The next request may take so long from now on."""
        if self._reading is not None and not self._reading.expired():
            until = asyncio.get_running_loop().time() + seconds
            self._reading.reschedule(until if math.isfinite(until) else None)

    async def _last_words(self, error: BaseException) -> None:
        """Of a call that fails as a whole, for each request that it takes along: not everybody sees a call's status."""
        if not self._begun or not isinstance(error, TwostrokeError) or isinstance(error, SlowReader):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                for name in self._cut or [""]:
                    await self._write(failure(name, error))

    async def _answer(self, request: pb.ModelInferRequest) -> None:
        """What goes wrong with one request is told in-band, as its neighbours go on."""
        name, streamed = request.id, list[Reply]()

        def note(reply: Reply) -> None:
            streamed.append(reply)
            self._replies[reply] = None

        try:
            await self._run(request, self._write_response, note)
        except SlowReader:
            raise
        except asyncio.CancelledError:
            self._cut.append(name)
            raise
        except TwostrokeError as error:
            await self._tell(name, error)
        except Exception as error:
            await self._tell(name, unexpected(error, METHOD))
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._expect(self._idle_s)
            for reply in streamed:
                self._replies.pop(reply, None)

    async def _write_response(self, response: pb.ModelInferResponse) -> None:
        await self._write(Message(infer_response=response))

    async def _write(self, message: Message) -> None:
        """Waits until the message has left. A writer that gives up meanwhile leaves the message to the pump, or takes
        it back where its turn has not come."""
        sent = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Waiting(message, sent))
        await sent

    async def _tell(self, name: str, error: TwostrokeError) -> None:
        """SlowReader where it cannot be told."""
        try:
            async with asyncio.timeout(self._slow_reader_s):
                await self._write(failure(name, error))
        except TimeoutError:
            raise SlowReader("the client reads too slowly") from None

    async def _pump(self) -> None:
        """Writes one message after the other: a call takes one at a time, and one that is begun goes through."""
        while True:
            waiting = await self._next()
            self._begun = True
            if waiting is None:
                reply = next(iter(self._replies), None)
                if reply is not None and not reply.ended:
                    await self._send(Message(infer_response=reply.response(final=False)))
            elif not waiting.sent.done():
                await self._send(waiting.message)
                if not waiting.sent.done():
                    waiting.sent.set_result(None)

    async def _next(self) -> _Waiting | None:
        """None after a silence."""
        if not self._queue.empty():
            return self._queue.get_nowait()
        try:
            async with asyncio.timeout(self._keep_alive_s or None):
                return await self._queue.get()
        except TimeoutError:
            return None


def failure(name: str, error: TwostrokeError) -> Message:
    """An error in-band: the text that Triton's clients read, and for others the status that a call would have had."""
    message = Message(error_message=error.message[:1000] or "no details")
    response = message.infer_response
    try:
        check_id(name)
        response.id = name
    except TwostrokeError:
        response.id = name[:128]  # no id that can be given back, but perhaps found
    response.parameters[FINAL].bool_param = True
    response.parameters["error_code"].string_param = code_of(error).name
    if error.field is not None:
        response.parameters["error_field"].string_param = error.field
    if error.retry_after_s is not None:
        response.parameters["error_retry_ms"].int64_param = round(error.retry_after_s * 1000)
    return message


def first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of a group of groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
