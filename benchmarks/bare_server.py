"""What grpc.aio can do: one task feeds a queue for each stream, each stream writes what its queue has. Nothing else.

`python benchmarks/bare_server.py STREAMS [hooked]`: prints its address; begins when so many streams are open. Plain
grpc.aio on uvloop; `hooked`: with `services/grpc_events.py`, as a gateway has it.
"""

import asyncio
import sys
from typing import Any

import grpc.aio
import uvloop

from twostroke.services.grpc_events import take_together
from twostroke.services.grpc_setup import bind, create_server
from twostroke.v1 import inference_pb2 as pb

PATH = "/bare/Stream"


class Bare:
    """As many streams as were announced, all fed by one task."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._queues: dict[int, asyncio.Queue[pb.GenerateResponse]] = {}
        self._left = 0
        self._written = asyncio.Event()
        self._complete = asyncio.Event()

    async def stream(self, request: bytes, context: Any) -> None:
        """One stream."""
        queue: asyncio.Queue[pb.GenerateResponse] = asyncio.Queue()
        self._queues[len(self._queues)] = queue
        if len(self._queues) == self._streams:
            self._complete.set()
        while True:
            await context.write(await queue.get())
            self._left -= 1
            if not self._left:
                self._written.set()

    async def engine(self) -> None:
        """A message for every stream, once all of the last ones are written."""
        await self._complete.wait()
        index = 0
        while True:
            index += 1
            message = pb.GenerateResponse(first_index=index, token_ids=[index % 49_000], text=" token")
            self._left = len(self._queues)
            self._written.clear()
            for queue in self._queues.values():
                queue.put_nowait(message)
            await self._written.wait()


async def main(streams: int, *, hooked: bool) -> None:
    """Until terminated."""
    if hooked:
        take_together()
    server = create_server()
    bare = Bare(streams)
    handler = grpc.unary_stream_rpc_method_handler(
        bare.stream, response_serializer=pb.GenerateResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", {"Stream": handler}),))
    address = bind(server, "127.0.0.1:0")
    await server.start()
    print(address, flush=True)
    await bare.engine()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), hooked="hooked" in sys.argv[2:]))
