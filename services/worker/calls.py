"""Calls from the event loop into a thread that runs events: each is answered, or fails when the thread ends."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from ...errors import Unavailable

T = TypeVar("T")


class Calls:
    """The calls under way. Belongs to the loop; answers come from the thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        post: Callable[[Callable[[], None]], None],
        on_loop: Callable[..., None],
    ) -> None:
        """`post`: runs an event on the thread. `on_loop`: from the thread, calls a function on the loop."""
        self._loop = loop
        self._post = post
        self._on_loop = on_loop
        self._waiting: set[asyncio.Future[Any]] = set()
        self._ended = False

    async def call(self, fn: Callable[[], T]) -> T:
        """Runs `fn` on the thread. Raises what it raises; Unavailable once the thread has ended."""
        if self._ended:
            raise Unavailable("the engine has stopped")
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)

        def event() -> None:
            try:
                value = fn()
            except BaseException as error:
                self._on_loop(_fail, future, error)
            else:
                self._on_loop(_answer, future, value)

        self._post(event)
        return await future

    def end(self) -> None:
        """The thread has ended: what was not answered never will be."""
        self._ended = True
        for future in tuple(self._waiting):
            _fail(future, Unavailable("the engine has stopped"))


def _answer(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
