"""One worker of the hand-over rig as a process of its own: `python -m tests.services.handover_child ROLE ...`.

It says who it is in its first line, takes a request half a line on stdin, and answers each with a line when it ended.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from twostroke.engine.request import Request, SamplingParams, SequenceKey, Work
from twostroke.services.handover.handover import PeerAddress

from .handover_rig import DecodeWorker, PrefillWorker


def say(**line: Any) -> None:
    """One line to the parent."""
    print(json.dumps(line), flush=True)


async def answer(worker: PrefillWorker | DecodeWorker, key: SequenceKey) -> None:
    """Says that the first token came, then how it ended."""
    await worker.until(lambda: key in worker.tokens or key in worker.failures)
    say(number=key.request, event="first")
    if isinstance(worker, DecodeWorker):
        await worker.ended(key)
        say(number=key.request, event="ended", tokens=worker.tokens.get(key), failure=repr(worker.failures.get(key)))


async def main(role: str, directory: str, address: str, silence_s: float, layer_s: float, ways: list[str]) -> None:
    """Runs until stdin ends."""
    loop = asyncio.get_running_loop()
    worker: PrefillWorker | DecodeWorker
    if role == "prefill":
        worker = PrefillWorker("child", Path(directory), 65, silence_s, token_budget=16, ways=ways)
        worker.address = address
        work = Work.PREFILL
    else:
        worker = DecodeWorker("child", Path(directory), 65, silence_s, ways=ways)
        work = Work.DECODE
    worker.runner.after_layer = lambda layer, rows: time.sleep(layer_s)
    await worker.start()
    say(incarnation=worker.identity.incarnation, address=worker.peer.address)
    tasks = set()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        half = json.loads(line)
        key = SequenceKey(*half["key"])
        peer = PeerAddress(*half["peer"])
        params = SamplingParams(temperature=0.0, max_tokens=half["count"])
        worker.submit(Request(key, half["prompt"], params, work, writer=peer.incarnation), peer)
        tasks.add(asyncio.create_task(answer(worker, key)))
    await worker.stop()


if __name__ == "__main__":
    of, folder, at, silence, layer, transports = sys.argv[1:]
    asyncio.run(main(of, folder, at, float(silence), float(layer), transports.split(",")))
