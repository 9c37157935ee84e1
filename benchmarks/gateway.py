"""The gateway's speed: the real process on one core, its clients and stand-in workers on another.

`make bench-gateway`, or `python benchmarks/gateway.py [--seconds S] [--only messages,coalesced,...] [--json]`: about
three minutes; says of each goal whether it was met. Rates are told by the wall and by the gateway's own CPU time, which
a busy machine spoils less. `--processes 2`: how much more two gateway processes carry than one; needs 12 cores.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import uvloop
from gateway_goals import verdicts
from gateway_many import carried, enough
from gateway_rig import CONNECTIONS, STREAMS, WORKERS, Feed, Rig, cpu_of, process
from gateway_streams import Counts, GrpcStreams, Span, Watch
from record import Recorder

AHEAD = 32  # tokens of a stream that the gateway may be behind, where it is to join them
IDLE = 10_000
MANY_WORKERS = 25
BARE = Path(__file__).with_name("bare_server.py")
BARE_PATH = "/bare/Stream"
WARM_S = 1.0


async def spanned(seconds: float, cpu: Callable[[], float], counts: Counts) -> Span:
    """What happens in so many seconds, after a moment to warm up."""
    await asyncio.sleep(WARM_S)
    watch = Watch(cpu, counts)
    await asyncio.sleep(seconds)
    return watch.span()


@contextlib.contextmanager
def polling() -> Iterator[None]:
    """The loop never sleeps: a core that does has to be woken for each message, by the one under test, which takes
    longer than writing it, in a virtual machine above all."""
    loop = asyncio.get_running_loop()
    on = True

    def turn() -> None:
        if on:
            loop.call_soon(turn)

    turn()
    try:
        yield
    finally:
        on = False


class Bench:
    """All measures; `core`: the gateway's."""

    def __init__(self, core: int, folder: Path, seconds: float, record: Recorder) -> None:
        self._rig = Rig(core, folder)
        self._core, self._folder, self._seconds, self._record = core, folder, seconds, record
        self._rate = 0.0  # messages a second of the wall
        self.noted: dict[str, list[float]] = defaultdict(list)  # what goals are about, by name

    async def bare(self) -> None:
        """grpc.aio alone, fed through queues."""
        self.noted["bare"].append(await self._bare("grpc.aio, fed through queues"))

    async def hooked(self) -> None:
        """The same as a gateway has it: with the handling of completions in `services/grpc_events.py`."""
        await self._bare("grpc.aio with our handling of completions, fed through queues", "hooked")

    async def _bare(self, peer: str, *words: str) -> float:
        with process({self._core}, self._folder / "bare.log", str(BARE), str(STREAMS), *words) as server:
            if server.stdout is None:
                raise RuntimeError("no output")
            address = (await asyncio.to_thread(server.stdout.readline)).decode().strip()
            clients = GrpcStreams(address, BARE_PATH)
            await clients.open(range(STREAMS), CONNECTIONS)
            await clients.counts.until(lambda: clients.counts.messages > STREAMS)
            span = await spanned(self._seconds, cpu_of(server.pid), clients.counts)
            clients.close()
        return self._rates("messages", span, span.messages, "messages/s", peer=peer)

    async def messages(self) -> None:
        """A token a message."""
        span = await self._fed(1)
        self._rate = span.messages / span.seconds
        self.noted["messages"].append(self._rates("messages", span, span.messages, "messages/s"))

    async def coalesced(self) -> None:
        """Workers are faster than messages can be."""
        span = await self._fed(AHEAD)
        self.noted["coalesced"].append(self._rates("coalesced", span, span.tokens, "tokens/s"))

    async def events(self) -> None:
        """Server-sent events, a token each."""
        async with (
            self._rig.running(WORKERS) as (_, cpu, __),
            self._rig.sse_streams() as clients,
            Feed(self._rig.workers, clients.counts, ahead=1),
        ):
            span = await spanned(self._seconds, cpu, clients.counts)
        self.noted["events"].append(self._rates("events", span, span.messages, "events/s"))

    async def latency(self) -> None:
        """From a worker's send to a client's receipt, at half of the rate that `messages` found. A step's tokens come
        at once and leave one after the other: the more workers there are, the fewer wait for each other. Clients poll:
        their waking up is none of the gateway's latency."""
        for workers in (WORKERS, MANY_WORKERS):
            await self._latency(workers, self._rate / 2 or 10_000.0)

    async def _latency(self, workers: int, rate: float) -> None:
        took: list[float] = []
        async with self._rig.running(workers) as (address, cpu, _), self._rig.grpc_streams(address) as clients:
            sent = {stream: worker.sent[stream] for worker in self._rig.workers for stream in worker.sent}

            def got(stream: int, first: int, tokens: int) -> None:
                now = time.perf_counter()
                took.extend(now - at for at in sent[stream][first : first + tokens])

            for worker in self._rig.workers:
                worker.keeps_times = True
            clients.counts.on_message = got
            async with Feed(self._rig.workers, clients.counts, ahead=None, pause_s=STREAMS / rate):
                with polling():
                    await asyncio.sleep(WARM_S)
                    took.clear()
                    watch = Watch(cpu, clients.counts)
                    await asyncio.sleep(self._seconds)
                    span = watch.span()
        percentiles = statistics.quantiles(took, n=100)
        shares = {"core_share": round(span.cpu / span.seconds, 3), "client_share": round(span.own / span.seconds, 3)}
        p99 = round(1e3 * percentiles[98], 3)
        self.noted[f"latency-{workers}"].append(p99)
        self._note("latency", 1e3 * percentiles[49], "ms", p99=p99, workers=workers, rate=round(rate), **shares)

    async def idle(self) -> None:
        """Memory of many open streams that have begun."""
        async with self._rig.running(WORKERS) as (address, _, gateway):
            before = gateway.memory_info().rss
            async with self._rig.grpc_streams(address, IDLE) as clients:
                for worker in self._rig.workers:
                    await worker.step()
                await clients.counts.until(lambda: clients.counts.messages == IDLE)
                rss = gateway.memory_info().rss
        self.noted["idle"].append(rss / 2**20)
        self._note("idle", rss / 2**20, "MiB", streams=IDLE, start_mib=round(before / 2**20))

    async def processes(self, most: int, cores: list[int]) -> None:
        """Messages of a token each by one gateway process, and by several on one port."""
        if not enough(most):
            print("too few cores: what this tells is that it runs, not how fast a gateway is", file=sys.stderr)
        for count in (1, most):
            told = await carried(count, cores, self._folder, self._seconds)
            self.noted[f"processes-{count}"].append(told.rate)
            figures = {name: round(value) for name, value in told._asdict().items() if name != "rate"}
            sizes = {"processes": count, "streams": STREAMS * count, "workers": WORKERS * count}
            self._note("processes", told.rate, "messages/s", **sizes, **figures)

    async def _fed(self, ahead: int) -> Span:
        """gRPC streams; workers are up to so many steps ahead of them."""
        async with (
            self._rig.running(WORKERS) as (address, cpu, _),
            self._rig.grpc_streams(address) as clients,
            Feed(self._rig.workers, clients.counts, ahead=ahead),
        ):
            return await spanned(self._seconds, cpu, clients.counts)

    def _rates(self, measure: str, span: Span, count: int, unit: str, peer: str | None = None) -> float:
        """Notes a rate; returns it by the CPU second."""
        self._note(
            measure,
            count / span.seconds,
            unit,
            peer=peer,
            per_cpu_second=round(count / span.cpu),
            core_share=round(span.cpu / span.seconds, 3),
            client_share=round(span.own / span.seconds, 3),
            tokens_a_message=round(span.tokens / max(1, span.messages), 2),
        )
        return count / span.cpu

    def _note(
        self,
        measure: str,
        value: float,
        unit: str,
        *,
        p99: float | None = None,
        peer: str | None = None,
        **more: object,
    ) -> None:
        point = {"processes": more.pop("processes")} if "processes" in more else {}
        self._record.add(
            "gateway", value, unit, p99=p99, peer=peer, measure=measure, streams=more.pop("streams", STREAMS),
            workers=more.pop("workers", WORKERS), **point, figures={**more, "load": round(os.getloadavg()[0], 1)},
        )  # fmt: skip
        tail = f", p99 {p99:g}" if p99 is not None else ""
        of = peer or (f"{point['processes']} processes" if point else "")
        print(f"{measure}{f' ({of})' if of else ''}: {value:,.2f} {unit}{tail} {more}",
              file=sys.stderr, flush=True)  # fmt: skip


MEASURES = ("bare", "hooked", "messages", "coalesced", "events", "latency", "idle")
ORDER = ("bare", "messages", "hooked", "messages", "bare", "coalesced", "events", "latency", "idle")
"""What is compared stands close together, and twice: the same core is not always as fast."""


async def run(arguments: argparse.Namespace, cores: list[int]) -> None:
    """The measures that were asked for, in order; then the goals."""
    with tempfile.TemporaryDirectory(prefix="gateway-") as name:
        folder = Path(name) / "bench"
        folder.mkdir()
        bench = Bench(arguments.core, folder, arguments.seconds, Recorder("gateway", arguments.out))
        if arguments.processes > 1:
            await bench.processes(arguments.processes, cores)
        else:
            for measure in arguments.only.split(",") if arguments.only else ORDER:
                await getattr(bench, measure)()
    told = verdicts(dict(bench.noted))
    if arguments.json:
        print(json.dumps({"goals": [verdict.plain() for verdict in told], "measured": bench.noted}))
    else:
        print(*told, sep="\n")


def main() -> None:
    """The command."""
    cores = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each measure")
    parser.add_argument("--core", type=int, default=cores[0], help="the gateway's")
    parser.add_argument("--only", default="", help=",".join(MEASURES))
    parser.add_argument("--processes", type=int, default=1, help="that many gateway processes against one, alone")
    parser.add_argument("--json", action="store_true", help="goals and what they are about, as JSON")
    parser.add_argument("--out", type=Path, help="another file for the figures")
    arguments = parser.parse_args()
    gc.disable()  # a client that stops for it would be taken for a slow gateway
    os.sched_setaffinity(0, {core for core in cores if core != arguments.core} or set(cores))
    uvloop.run(run(arguments, cores))


if __name__ == "__main__":
    main()
