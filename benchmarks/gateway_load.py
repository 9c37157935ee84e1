"""A process of stand-in workers, or of clients, for a gateway that one process of either cannot keep busy.

They share a file with a number for each stream: the tokens that its client has got. A worker makes a token for the
streams that it runs for one gateway process once all of them have got the last one.
"""

import argparse
import asyncio
import mmap
from pathlib import Path

import uvloop
from gateway_model import make_model
from gateway_streams import GrpcStreams
from packed_worker import GatewaySession, PackedWorker

NUMBER_BYTES = 8
LOOK_S = 0.0002  # between two looks at what clients have got; from another process nothing wakes
STREAMS_A_CONNECTION = 2  # many connections, so that the system deals them out evenly among the processes of a port


class Board:
    """The shared numbers."""

    def __init__(self, path: Path, streams: int) -> None:
        """Makes the file where there is none."""
        size = streams * NUMBER_BYTES
        with path.open("a+b") as file:
            file.truncate(size)
            self.got = memoryview(mmap.mmap(file.fileno(), size)).cast("q")

    async def drive(self, session: GatewaySession) -> None:
        """Makes a worker step."""
        while True:
            got = self.got
            late = any(got[stream] < session.made[request] for request, stream in session.streams.items())
            if late or not session.streams:
                await asyncio.sleep(LOOK_S)
            else:
                await session.step()


async def work(board: Board, model: Path, first: int, count: int) -> None:
    """So many workers: prints their addresses."""
    tokens = make_model(model)
    workers = [PackedWorker(f"worker-{first + i}", model.name, tokens, board.drive) for i in range(count)]
    print(*[await worker.start() for worker in workers], flush=True)
    await asyncio.Event().wait()


async def read(board: Board, address: str, first: int, count: int) -> None:
    """So many clients, until a stream ends."""
    clients = GrpcStreams(address)

    def note(stream: int, _: int, tokens: int) -> None:
        board.got[stream] += tokens

    clients.counts.on_message = note
    await clients.open(range(first, first + count), max(1, count // STREAMS_A_CONNECTION))
    await clients.counts.until(lambda: False)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("workers", "clients"))
    parser.add_argument("--board", type=Path, required=True)
    parser.add_argument("--streams", type=int, required=True, help="of all clients")
    parser.add_argument("--model", type=Path, help="a folder of its own, named as the gateway's")
    parser.add_argument("--address", help="the gateway's")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--count", type=int, required=True)
    told = parser.parse_args()
    board = Board(told.board, told.streams)
    if told.role == "workers":
        uvloop.run(work(board, told.model, told.first, told.count))
    else:
        uvloop.run(read(board, told.address, told.first, told.count))


if __name__ == "__main__":
    main()
