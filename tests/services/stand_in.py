"""A stand-in for a gateway or worker: a process with a real gRPC health server, and the faults that a test asks for.

python stand_in.py ADDRESS JOURNAL NAME [FAULT]: it appends what happens to it to the file JOURNAL. FAULT: `exit=CODE`
ends at once; `never` is never ready; `deaf` ignores SIGTERM; `die` dies 0.3 s after it said that it is ready, the first
time only.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio


class Journal:
    """Lines `NAME WHAT PID` of all stand-ins of a test."""

    def __init__(self, path: str, name: str) -> None:
        self._path, self._name = Path(path), name

    def note(self, what: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{self._name} {what} {os.getpid()}\n")

    def is_first(self) -> bool:
        return not self._path.exists() or f"{self._name} started" not in self._path.read_text()


class Mortal(health_aio.HealthServicer):
    """Dies soon after it first said that it serves: whoever asked has heard it."""

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = await super().Check(request, context)
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            asyncio.get_running_loop().call_later(0.3, os.kill, os.getpid(), signal.SIGKILL)
        return answer


async def main(address: str, journal: Journal, first: bool, fault: str) -> int:
    note = journal.note
    stop = asyncio.Event()

    def terminate() -> None:
        note("terminated")
        if fault != "deaf":
            stop.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    servicer = Mortal() if fault == "die" and first else health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    answer = health_pb2.HealthCheckResponse
    await servicer.set("", answer.NOT_SERVING if fault == "never" else answer.SERVING)
    await stop.wait()
    await server.stop(0)
    note("ended")
    return 0


if __name__ == "__main__":
    _, where, path, who, wrong, *_ = [*sys.argv, ""]
    mine = Journal(path, who)
    early = mine.is_first()
    mine.note("started")
    if wrong.startswith("exit="):
        sys.exit(int(wrong.removeprefix("exit=")))
    sys.exit(asyncio.run(main(where, mine, early, wrong)))
