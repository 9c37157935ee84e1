"""A device that computes behind the host's back, on threads: steps overlap, and copies beside them come late.

What a GPU does, without one: a launched step is computed layer by layer once its layers are launched; a copy waits for
the write of its layer, and the host sees it completed on yet another thread.
"""

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from twostroke.engine.batch import UNSEEN, Launched, LayerHook, Row
from twostroke.engine.request import SequenceKey, Token
from twostroke.kvtransfer.layer_marks import stretch_ends
from twostroke.kvtransfer.messages import Copy, Verify
from twostroke.kvtransfer.pool_pages import CpuDigester, Digested
from twostroke.kvtransfer.transport import Done, Transport
from twostroke.services.handover.pool_opener import Broken, Open
from twostroke.services.handover.wire_link import PoolOffer

from .handover_rig import LAYERS, TensorRunner

LONGEST_S = 0.003  # of a layer, a copy, a digest


class Thread:
    """Runs what it is given, in order, each after a moment."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def pause(self) -> None:
        """A moment, or none."""
        if self._random.random() < 0.5:
            time.sleep(self._random.random() * LONGEST_S)

    def close(self) -> None:
        """Once all is done."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self.pause()
            work()


class Event:
    """As torch's."""

    def __init__(self) -> None:
        self._happened = threading.Event()

    def record(self) -> None:
        self._happened.set()

    def query(self) -> bool:
        return self._happened.is_set()

    def synchronize(self) -> None:
        self._happened.wait()


class LateStep:
    """A step on its way."""

    def __init__(self, number: int, rows: list[Row]) -> None:
        self.event = Event()
        self.number = number
        self.rows = rows
        self.launched = threading.Semaphore(0)  # layers
        self.broken = False  # its launch was given up
        self.result: list[Token] = []
        self.error: Exception | None = None

    def tokens(self) -> list[Token]:
        self.event.synchronize()
        if self.error is not None:
            raise self.error
        return self.result


class LateRunner(TensorRunner):
    """Launches; a thread computes."""

    overlaps = True

    def __init__(self, pool: Tensor, seed: int = 0) -> None:
        """`pool`: [LAYERS, pages, 2, 1, PAGE, 2] int32."""
        super().__init__(pool)
        self.stream = Thread(seed)
        self.most_on_the_way = 0
        self._steps = 0
        self._computed = (0, 0)  # steps, and layers of the next one
        self._moved = threading.Condition()
        self._marks: dict[int, tuple[int, int]] = {}
        self._ends = set[int]()
        self._last: dict[SequenceKey, int] = {}

    def launch(self, rows: list[Row], hook: LayerHook | None) -> Launched:
        own = [replace(row, token_ids=list(row.token_ids), pages=list(row.pages)) for row in rows]
        step = LateStep(self._steps, own)
        self._steps += 1
        self.most_on_the_way = max(self.most_on_the_way, self._steps - self._computed[0])
        self.stream.put(lambda: self._compute(step))
        try:
            progress = [row.progress for row in rows if row.progress is not None]
            for layer in range(LAYERS):
                step.launched.release()
                self.after_layer(layer, rows)
                if hook is not None:
                    hook(layer, progress)
            if self.fail_with is not None:
                error, self.fail_with = self.fail_with, None
                raise error
        except BaseException:
            step.broken = True
            raise
        finally:
            step.launched.release()
        return step

    def written(self, layer: int) -> None:
        """As `CudaSource.written`: of all layers of a stretch."""
        self._marks[layer] = (self._steps - 1, layer + 1)
        self._ends.add(layer)

    def mark(self, layer: int) -> tuple[int, int]:
        """What a copy of that layer must wait for."""
        return self._marks.get(min((end for end in self._ends if end >= layer), default=layer), (0, 0))

    def reach(self, mark: tuple[int, int]) -> None:
        """Waits until so much is computed."""
        with self._moved:
            self._moved.wait_for(lambda: self._computed >= mark)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        done = threading.Event()
        self.stream.put(done.set)
        done.wait()
        super().copy_pages(sources, targets)

    def _compute(self, step: LateStep) -> None:
        for row in step.rows:
            if row.token_ids == [UNSEEN]:
                row.token_ids = [self._last[row.key]]
        for layer in range(LAYERS):
            step.launched.acquire()
            self.stream.pause()
            for row in step.rows:
                self._write(layer, row)
            self._reached((step.number, layer + 1))
        step.launched.acquire()
        try:
            if not step.broken:
                self._draw(step)
        except Exception as error:
            step.error = error
        self._reached((step.number + 1, 0))
        step.event.record()

    def _draw(self, step: LateStep) -> None:
        self.tokens_run += sum(len(row.token_ids) for row in step.rows)
        for row in step.rows:
            for sample in range(row.key.sample, row.key.sample + row.samples if row.sample else 0):
                token = self._sample(row, sample)
                self._last[row.key._replace(sample=sample)] = token.token_id
                step.result.append(token)

    def _reached(self, mark: tuple[int, int]) -> None:
        with self._moved:
            self._computed = mark
            self._moved.notify_all()


class LateTransport:
    """Copies beside what the runner computes."""

    def __init__(self, inner: Transport, runner: LateRunner, seed: int) -> None:
        self.kind = inner.kind
        self.inner = inner
        self._runner = runner
        self._stream = Thread(seed)
        self._open = True

    def start(self, copy: Copy, done: Done) -> None:
        self.start_layers([copy], lambda digests: done(copy.copy, digests))

    def start_layers(self, copies: Sequence[Copy], done: Callable[[bytes], None]) -> None:
        assert [copy.layer for copy in copies] == list(range(copies[0].layer, copies[0].layer + len(copies)))
        assert len({(copy.ticket, copy.ordinal, copy.src, copy.dst) for copy in copies}) == 1
        mark, landed = self._runner.mark(copies[-1].layer), list[bytes]()

        def run() -> None:
            self._runner.reach(mark)
            for copy in copies:
                self.inner.start(copy, lambda _, digests: landed.append(digests))
            done(b"".join(landed))

        self._stream.put(run)

    def peer_gone(self) -> None:
        self.inner.peer_gone()

    def probe(self) -> float:
        return self.inner.probe()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._stream.close()
            self.inner.close()


class LateDigester:
    """Computes digests on a thread."""

    def __init__(self, inner: CpuDigester, seed: int) -> None:
        self._inner = inner
        self._stream = Thread(seed)

    def start(self, verify: Verify, digested: Digested) -> None:
        self._stream.put(lambda: self._inner.start(verify, digested))

    def close(self) -> None:
        self._stream.close()


class LateHandover:
    """What a worker of the rig is built of where its device computes late."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.runner: LateRunner
        stretched = stretch_ends(LAYERS, most=1 + seed % 2)
        self.ends = range(LAYERS) if seed % 3 == 0 else stretched  # layers whose pages leave alone, or together

    def make_runner(self, pool: Tensor) -> LateRunner:
        """`pool`: [LAYERS, pages, 2, 1, PAGE, 2] int32."""
        self.runner = LateRunner(pool, self.seed)
        return self.runner

    def opener(self, opener: Open) -> Open:
        """Opens what `opener` does, for late copies."""

        def open_pool(offer: PoolOffer, incarnation: int, broken: Broken) -> Transport:
            return LateTransport(opener(offer, incarnation, broken), self.runner, self.seed)

        return open_pool

    def digester(self, pages: Tensor) -> LateDigester:
        """`pages`: [layers, pages, page_bytes] uint8."""
        return LateDigester(CpuDigester(pages), self.seed)
