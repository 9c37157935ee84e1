"""A worker's engine, made ready: model found, KV pool allocated, weights loaded. Blocks for seconds to minutes."""

import contextlib
import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from ...engine.build import Engine, build_engine
from ...engine.config import EngineOptions
from ...engine.core import EngineCore
from ...engine.dummy_weights import dummy_fingerprint
from ...engine.model_files import SIZES_ONLY
from ...engine.models import fingerprint, resolve, served_name
from ...engine.request import Request, SamplingParams, SequenceKey
from ...engine.start_times import StartTimes
from ...errors import ConfigError, TwostrokeError, Unavailable
from ...kvtransfer.cuda_pool import CudaPool
from ...kvtransfer.cuda_runtime import check_bindings
from ...kvtransfer.shm import SharedPool, file_name, sweep
from ...v1 import worker_pb2 as pb
from ..bars import Report, bars_if
from ..settings import WorkerSettings
from .worker_transports import check_transport

log = logging.getLogger(__name__)

MEMORY_WAIT_S = 10.0
_MEMORY_RETRY_S = 0.25
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM)
_WARM_UP_STEPS = 1000
_WARM_UP_SALT = b"warm-up"


class WorkerEngine:
    """An engine and what it stands on; `load` first. A decode worker's pool is memory that others can map."""

    def __init__(self, settings: WorkerSettings, incarnation: int, *, bars: bool = False) -> None:
        """`incarnation`: of this process; names the pool's file. `bars`: show on stderr how far loading is."""
        self._bars = bars
        self.shared: SharedPool | CudaPool | None = None
        self.form = pb.ModelFormat()
        self._settings = settings
        self._incarnation = incarnation
        self._engine: Engine | None = None
        self._closed = False

    @property
    def engine(self) -> Engine:
        """Unavailable before `load` is done."""
        if self._engine is None:
            raise Unavailable("the engine is not loaded")
        return self._engine

    def load(self) -> None:
        """Finds the model (it may have to be downloaded) and builds the engine. Raises ConfigError with the remedy."""
        settings, options, times = self._settings, self._settings.engine_options(), StartTimes()
        if settings.role != "both":
            check_transport(settings)
            if options.device_type == "cuda":
                check_bindings()
        removed = sweep(settings.shm_dir)
        if removed:
            log.info("removed %d KV pools of dead workers from %s", removed, settings.shm_dir)
        with bars_if(self._bars) as progress:
            with times.part("model"):
                directory, print_ = self._find(options, progress)
            self._engine = build_engine(
                directory,
                options,
                fingerprint=print_,
                allocate=self._allocate_shared if settings.role == "decode" else None,
                times=times,
                progress=progress,
            )
        self.form = model_format(self._engine, served_name(settings.model), print_)
        for line in self._engine.memory.lines():
            log.info("%s", line)
        log.info(
            "%s loaded in %.1f s: %d KV pages of %d tokens, %.0f MiB",
            self.form.model,
            times.total,
            self._engine.plan.usable,
            self._engine.plan.page_size,
            self._engine.plan.nbytes / 2**20,
        )

    def _find(self, options: EngineOptions, progress: Report | None) -> tuple[Path, str]:
        """The model's directory and fingerprint."""
        name, folder = self._settings.model, self._settings.models_dir
        if options.load_format == "dummy":
            log.warning("load_format is dummy: the weights are random, and so is every answer")
            directory = resolve(name, cache_dir=folder, progress=progress, parts=SIZES_ONLY)
            return directory, dummy_fingerprint(directory, options)
        directory = resolve(name, cache_dir=folder, progress=progress)
        return directory, fingerprint(directory)

    def close(self) -> None:
        """Removes the pool's file. May be called again, also while `load` runs elsewhere, which then makes none."""
        self._closed = True
        if self.shared is not None:
            self.shared.close()
        else:  # `load` may be filling it, for seconds that this process no longer has
            with contextlib.suppress(OSError):
                (self._settings.shm_dir / file_name(self._incarnation)).unlink()

    def _allocate_shared(self, nbytes: int) -> Tensor:  # [nbytes] uint8
        device = self._settings.device
        if self._settings.engine_options().device_type == "cuda":  # whose memory was waited for already
            self.shared = CudaPool.create(nbytes, device=device, incarnation=self._incarnation)
        else:
            self.shared = wait_for_memory(lambda: self._create(nbytes))
        return self.shared.tensor

    def _create(self, nbytes: int) -> SharedPool:
        if not self._closed:
            pool = SharedPool.create(self._settings.shm_dir, nbytes, incarnation=self._incarnation)
            if not self._closed:
                return pool
            pool.close()
        raise Unavailable("the worker ends")


def wait_for_memory(create: Callable[[], SharedPool], wait_s: float = MEMORY_WAIT_S) -> SharedPool:
    """Tries for `wait_s`: a dead predecessor's memory is free only once its peers let go, and nothing tells when.

    Raises ConfigError: at once where it is not room that is lacking.
    """
    until = time.monotonic() + wait_s
    while True:
        try:
            return create()
        except ConfigError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in _NO_ROOM or time.monotonic() >= until:
                raise
            log.warning("%s; trying again", error.message)
            time.sleep(_MEMORY_RETRY_S)


def model_format(engine: Engine, name: str, print_: str) -> pb.ModelFormat:
    """What is computed and how its KV lies in memory. One rank that holds all KV heads, for now."""
    config, plan = engine.config, engine.plan
    return pb.ModelFormat(
        model=name,
        fingerprint=print_,
        kv_dtype=plan.dtype,
        page_size=plan.page_size,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rank=0,
        ranks=1,
        first_kv_head=0,
        num_kv_heads=config.kv_heads,
    )


def warm_up(core: EngineCore, page_size: int) -> None:
    """One greedy and one sampled sequence, so that the first request pays for no first call. On the engine's thread."""
    plain = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    drawn = SamplingParams(temperature=1.0, top_k=8, top_p=0.9, max_tokens=2, ignore_eos=True, logprobs=1)
    keys = []
    for number, params in enumerate((plain, drawn)):
        key = SequenceKey(0, number, 0, 0)  # no gateway has the incarnation 0
        core.add(Request(key, [number] * (page_size + 1), params, cache_salt=_WARM_UP_SALT))
        keys.append(key)
    for _ in range(_WARM_UP_STEPS):
        if not core.has_work():
            return
        for _, error in core.step().failures:
            raise TwostrokeError(f"the warm-up failed: {error!r}") from error
    for key in keys:
        core.cancel(key)
    raise TwostrokeError("the warm-up did not end")
