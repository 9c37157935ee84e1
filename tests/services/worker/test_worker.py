"""The worker process: its parts alone, then real processes with a tiny random model."""

import asyncio
import errno
import importlib.util
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from twostroke.engine.build import build_engine
from twostroke.engine.config import EngineOptions
from twostroke.engine.models import fingerprint
from twostroke.engine.request import Request, SamplingParams, SequenceKey, Work
from twostroke.errors import ConfigError, TwostrokeError, Unavailable
from twostroke.services.grpc_setup import open_channel
from twostroke.services.handover.handover import NoHandover
from twostroke.services.settings import WorkerSettings
from twostroke.services.stopping import Stopping, unless
from twostroke.services.supervisor.health import Condition, HealthProbe
from twostroke.services.supervisor.machine import free_ports
from twostroke.services.worker import worker as worker_module
from twostroke.services.worker.driver import Driver
from twostroke.services.worker.worker import advertised, in_thread, serve
from twostroke.services.worker.worker_engine import WorkerEngine, wait_for_memory, warm_up
from twostroke.v1 import worker_pb2 as pb
from twostroke.v1 import worker_pb2_grpc


def load(path: str) -> Any:
    """A helper module, by its path below `tests`."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(__file__).parent.parent.parent / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Gateway = load("services/scripted_gateway.py").Gateway
OPTIONS = EngineOptions(dtype="float32", kv_memory=4 << 20, threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = load("tiny.py").make_tiny_llama(tmp_path_factory.mktemp("worker") / "tiny")
    return directory


def settings_of(role: str, model: Path, **more: Any) -> WorkerSettings:
    values = {"role": role, "model": str(model), "dtype": "float32", "kv_memory": 4 << 20, "threads": 1, **more}
    return WorkerSettings(**values)


def reference(model: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy output of the bare engine."""
    core = build_engine(model, OPTIONS, fingerprint="x").core
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    core.add(Request(SequenceKey(1, 1, 0, 0), prompt, params))
    tokens: list[int] = []
    while core.has_work():
        tokens += [token.token_id for output in core.step().outputs for token in output.tokens]
    return tokens


# Parts


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [
        ("10.1.2.3:700", "", "10.1.2.3:700"),
        ("10.1.2.3:700", "host.example:1", "host.example:1"),
        ("10.1.2.3:700", "host.example:0", "host.example:700"),
        ("0.0.0.0:700", "host.example:1", "host.example:1"),
    ],
)
def test_the_advertised_address(listen: str, advertise: str, expected: str, model: Path) -> None:
    assert advertised(settings_of("both", model, advertise=advertise), listen) == expected


@pytest.mark.parametrize("resolves", [True, False])
def test_a_wildcard_is_advertised_as_this_machine(
    resolves: bool, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def getaddrinfo(*_: object) -> list[object]:
        if resolves:
            return []
        raise OSError

    monkeypatch.setattr(worker_module.socket, "getaddrinfo", getaddrinfo)
    got = advertised(settings_of("both", model), "[::]:77")
    assert got == (f"{socket.gethostname()}:77" if resolves else "127.0.0.1:77")
    assert ("does not resolve" in caplog.text) is not resolves


async def test_in_thread_answers_and_raises() -> None:
    assert await in_thread("work", lambda: None)
    with pytest.raises(KeyError):
        await in_thread("work", lambda: {}["missing"])


async def test_a_thread_that_nobody_waits_for_harms_nothing() -> None:
    gate, over = threading.Event(), asyncio.Event()
    over.set()
    assert await unless(over, in_thread("work", gate.wait)) is None
    gate.set()


async def test_unless() -> None:
    event = asyncio.Event()
    assert await unless(event, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ZeroDivisionError):
        await unless(event, in_thread("work", lambda: 1 // 0))
    work = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(event.set)
    assert await unless(event, work) is None
    assert work.cancelled()


async def test_signals_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    stopping = Stopping()
    stopping.install()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stopping.first.wait(), 10)
        assert not stopping.second.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(stopping.second.wait(), 10)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        stopping.remove()


def test_waiting_for_memory() -> None:
    tries: list[int] = []
    reason = errno.ENOSPC

    def create() -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise ConfigError("full", field="shm_dir") from OSError(reason, "why")
        return "pool"

    assert wait_for_memory(create) == "pool"
    tries.clear()
    with pytest.raises(ConfigError):
        wait_for_memory(create, wait_s=0)
    assert len(tries) == 1
    tries.clear()
    reason = errno.ENOENT
    with pytest.raises(ConfigError):
        wait_for_memory(create)
    assert len(tries) == 1


@pytest.mark.parametrize("role", ["decode", "prefill", "both"])
def test_only_a_decode_workers_pool_is_a_file(role: str, model: Path, tmp_path: Path) -> None:
    stale = tmp_path / "twostroke-00000000000000aa.kv"
    stale.write_bytes(b"x")
    loaded = WorkerEngine(settings_of(role, model, shm_dir=tmp_path), 0xABC)
    with pytest.raises(Unavailable):
        _ = loaded.engine
    loaded.load()
    files = [path.name for path in tmp_path.iterdir()]
    assert files == (["twostroke-0000000000000abc.kv"] if role == "decode" else [])
    assert loaded.form == pb.ModelFormat(
        model="tiny",
        fingerprint=fingerprint(model),
        kv_dtype="float32",
        page_size=16,
        layers=2,
        kv_heads=2,
        head_dim=16,
        ranks=1,
        num_kv_heads=2,
    )
    if loaded.shared is not None:
        loaded.engine.pool[0, 1].fill_(1)
        assert loaded.shared.tensor.count_nonzero() > 0  # it is the same memory
    loaded.close()
    loaded.close()
    assert list(tmp_path.iterdir()) == []


def test_it_tells_where_memory_and_time_go(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = WorkerEngine(settings_of("both", model), 0xABC)
    with caplog.at_level(logging.INFO, "twostroke"):
        loaded.load()
    for words in ("memory of cpu, GiB", "KV pool, float32", "sequences that fit", "KV pages of 16 tokens"):
        assert words in caplog.text
    assert list(loaded.engine.times.to_dict())[:3] == ["model", "configuration", "weights"]


def test_random_weights_have_a_fingerprint_of_their_own(model: Path, tmp_path: Path) -> None:
    """And need nothing but config.json."""
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    settings = settings_of("both", tmp_path, load_format="dummy")
    prints = []
    for _ in range(2):
        loaded = WorkerEngine(settings, 0xABC)
        loaded.load()
        prints.append(loaded.form.fingerprint)
    assert prints[0] == prints[1]
    assert prints[0] != fingerprint(model)
    with pytest.raises(ConfigError, match=r"lacks tokenizer\.json, \*\.safetensors"):
        WorkerEngine(settings_of("both", tmp_path), 0xABC).load()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_gpu_without_its_bindings_is_refused_by_name(role: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ConfigError, match="package cuda-bindings is missing") as raised:
        WorkerEngine(settings_of(role, model, device="cuda:1"), 0xABC).load()
    assert raised.value.field == "device"


def test_an_engine_that_is_closed_while_it_loads_leaves_no_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the pool's file is made, while it is filled, and after."""
    settings = settings_of("decode", model, shm_dir=tmp_path)
    early = WorkerEngine(settings, 0xABC)
    early.close()
    with pytest.raises(Unavailable):
        early.load()
    during = WorkerEngine(settings, 0xABC)
    fill = os.posix_fallocate

    def closing(*arguments: int) -> None:
        fill(*arguments)
        assert len(list(tmp_path.iterdir())) == 1
        during.close()
        assert list(tmp_path.iterdir()) == [], "the process may end now"

    monkeypatch.setattr(os, "posix_fallocate", closing)
    with pytest.raises(Unavailable):
        during.load()
    assert list(tmp_path.iterdir()) == []


def test_the_warm_up_leaves_nothing_but_cached_pages(model: Path) -> None:
    core = build_engine(model, OPTIONS, fingerprint="x").core
    warm_up(core, OPTIONS.page_size)
    core.check_integrity(idle=True)
    assert core.load().steps >= 2


def test_a_warm_up_that_fails_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = build_engine(model, OPTIONS, fingerprint="x").core

    def run(*_: object) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(core._runner, "run", run)
    with pytest.raises(TwostrokeError, match="no such instruction"):
        warm_up(core, OPTIONS.page_size)


async def test_a_real_engine_under_its_driver(model: Path) -> None:
    core = build_engine(model, OPTIONS, fingerprint="x").core
    done = asyncio.Event()
    tokens: list[int] = []

    def on_result(result: Any) -> None:
        for output in result.outputs:
            tokens.extend(token.token_id for token in output.tokens)
            if output.finish:
                done.set()

    driver = Driver(core, NoHandover(), asyncio.get_running_loop(), on_result, strict=True, check_s=0)
    driver.start()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    driver.submit(Request(SequenceKey(1, 1, 0, 0), [5, 6, 7], params), None)
    await asyncio.wait_for(done.wait(), 30)
    await driver.call(lambda: core.check_integrity(idle=True))
    await driver.stop()
    assert driver.failure is None
    assert tokens == reference(model, [5, 6, 7], 20)


# Processes


class Process:
    """A worker's process; its log goes to `log`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid
        self.log = ""
        self.address = ""
        self._more = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.log += line.decode()
            self._more.set()
        self._more.set()

    async def says(self, pattern: str) -> str:
        """The first group of `pattern`, as soon as the log has it."""
        async with asyncio.timeout(60):
            while (match := re.search(pattern, self.log)) is None:
                assert not self._reader.done(), self.log
                self._more.clear()
                await self._more.wait()
        return match[1] if match.groups() else match[0]

    async def ready(self) -> None:
        self.address = await self.says(r"listens on (\S+)")
        await self.says(r"ready: tiny")

    async def exit_code(self) -> int:
        async with asyncio.timeout(40):
            code = await self.process.wait()
            await self._reader
        return code


@asynccontextmanager
async def running(role: str, model: Path, *flags: str) -> AsyncIterator[Process]:
    common = [
        "--parent",
        str(os.getpid()),
        "--model",
        str(model),
        "--dtype",
        "float32",
        "--kv-memory",
        "4MiB",
        "--threads",
        "1",
    ]
    words = ["-m", "twostroke.services.cli", role, "--listen", "127.0.0.1:0", *common, *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TWOSTROKE_")}
    child = await asyncio.create_subprocess_exec(sys.executable, *words, stderr=-1, env=environment)
    process = Process(child)
    try:
        yield process
    finally:
        if child.returncode is None:
            child.kill()
        await process.exit_code()


async def test_a_process_serves_drains_and_exits(model: Path) -> None:
    prompt = [7, 8, 9]
    async with running("both", model, "--name", "b0") as process:
        await process.ready()
        probe = HealthProbe(process.address)
        assert await probe.check(5) is Condition.SERVING
        async with Gateway(process.address) as gateway:
            hello = gateway.worker_hello
            assert (hello.identity.name, hello.identity.pid, hello.role) == ("b0", process.pid, pb.ROLE_BOTH)
            assert (hello.address, hello.max_tokens) == (process.address, 2048)
            assert hello.max_batch == 64
            assert {"model", "weights", "warm-up"} <= set(hello.start_seconds)
            assert hello.memory_bytes["kv"] <= 4 << 20 < 2 * hello.memory_bytes["kv"]
            await gateway.submit(1, prompt, 10)
            await gateway.finished(1)
            assert gateway.tokens[1] == reference(model, prompt, 10)
            await gateway.submit(2, prompt, 400)
            await gateway.until(lambda: gateway.tokens[2])
            process.process.send_signal(signal.SIGTERM)
            await gateway.until(lambda: gateway.statuses and gateway.statuses[-1].draining)
            assert await probe.check(5) is Condition.NOT_SERVING
            await gateway.submit(3, prompt, 5)
            await gateway.until(lambda: 3 in gateway.failures)
            assert gateway.failures[3].code == pb.FAILURE_CODE_DRAINING
            await gateway.finished(2)
            assert gateway.tokens[2] == reference(model, prompt, 400)
            code, _ = await gateway.status()
            assert code is grpc.StatusCode.UNAVAILABLE
        await probe.close()
        assert await process.exit_code() == 0
        assert "Traceback" not in process.log


async def test_a_second_signal_ends_at_once(model: Path) -> None:
    async with running("both", model, "--drain-s", "3600") as process:
        await process.ready()
        async with Gateway(process.address) as gateway:
            await gateway.submit(1, [7, 8, 9], 2000)
            await gateway.until(lambda: gateway.tokens[1])
            process.process.send_signal(signal.SIGTERM)
            await process.says("finishing what runs")
            process.process.send_signal(signal.SIGINT)
            assert await process.exit_code() == 0
            assert 1 not in gateway.finishes


async def test_an_idle_process_sleeps(model: Path) -> None:
    async with running("both", model) as process:
        await process.ready()
        async with Gateway(process.address):
            await asyncio.sleep(0.5)
            before = psutil.Process(process.pid).cpu_times()
            await asyncio.sleep(2)
            after = psutil.Process(process.pid).cpu_times()
    spent = after.user + after.system - before.user - before.system  # each wake-up costs more beside busy neighbours
    assert spent <= 0.1


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--listen", "{taken}"], "listen"),
        (["--model", "/no/such/place"], "model"),
        (["--shm-dir", "/no/such/place"], "/no/such/place"),
    ],
)
async def test_what_cannot_start_says_why(flags: list[str], text: str, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        async with running("decode", model, *[flag.format(taken=address) for flag in flags]) as process:
            assert await process.exit_code() == 2
            assert re.search(rf"(?m)^error: .*{text}", process.log)
            assert "Traceback" not in process.log


async def test_kv_goes_from_a_prefill_to_a_decode_process(model: Path, tmp_path: Path) -> None:
    prompt = list(range(3, 103))
    shared = ["--shm-dir", str(tmp_path)]
    async with running("prefill", model, *shared) as p, running("decode", model, *shared) as d:
        await asyncio.gather(p.ready(), d.ready())
        assert len(list(tmp_path.iterdir())) == 1
        async with Gateway(p.address) as at_p, Gateway(d.address, incarnation=at_p.incarnation) as at_d:
            to_p, to_d = peer(at_p), peer(at_d)
            await at_d.write(pb.ToWorker(peers=pb.Peers(peers=[to_p])))
            for number, length in enumerate((100, 1, 15, 16, 17, 64)):
                await at_p.submit(number, prompt[:length], 12, Work.PREFILL, peer=to_d)
                await at_d.submit(number, prompt[:length], 12, Work.DECODE, peer=to_p)
                await at_d.finished(number)
                assert not at_d.failures
                assert at_d.tokens[number] == reference(model, prompt[:length], 12)
                await at_p.until(lambda number=number: at_p.tokens[number])
                assert at_p.tokens[number] == at_d.tokens[number][:1]
            for number in range(6):
                at_first, at_second = at_p.timings[number], at_d.timings[number]
                assert at_second.prefill_us == at_first.prefill_us > 0
                assert (at_second.queue_us, at_second.cached_tokens) == (at_first.queue_us, at_first.cached_tokens)
                assert at_second.transfer_us > at_first.transfer_us == 0
            assert at_p.timings[5].cached_tokens > 0
        for process in (p, d):
            process.process.send_signal(signal.SIGTERM)
        assert await asyncio.gather(p.exit_code(), d.exit_code()) == [0, 0]
        assert list(tmp_path.iterdir()) == []
        assert "Traceback" not in p.log + d.log


def peer(gateway: Any) -> pb.Peer:
    """The worker at the other end, as the other worker is told of it."""
    hello = gateway.worker_hello
    return pb.Peer(address=hello.address, incarnation=hello.identity.incarnation)


async def until(probe: HealthProbe, condition: Condition) -> None:
    async with asyncio.timeout(30):
        while await probe.check(1) is not condition:
            await asyncio.sleep(0.05)


async def test_links_and_sessions_wait_until_the_model_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch, unused: Callable[[], str]
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(WorkerEngine, "load", lambda self: gate.wait() and None)
    address = unused()
    serving = asyncio.create_task(serve(settings_of("prefill", model, listen=address)))
    try:
        probe = HealthProbe(address)
        await until(probe, Condition.NOT_SERVING)
        code, details = await Gateway(address).refusal()
        assert (code, "loads the model" in details) == (grpc.StatusCode.UNAVAILABLE, True)
        channel = open_channel(address)
        call: Any = worker_pb2_grpc.WorkerStub(channel).Link()
        await call.write(pb.FromDecode(hello=pb.DecodeHello()))
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await channel.close()
        await probe.close()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(serving, 20)  # ends though the loading goes on
    finally:
        gate.set()
        serving.cancel()


@pytest.fixture
def unused() -> Callable[[], str]:
    def address() -> str:
        return f"127.0.0.1:{free_ports(1)[0]}"  # no connection of a neighbour's takes it meanwhile

    return address


async def test_an_engine_that_fails_ends_the_process(
    model: Path, monkeypatch: pytest.MonkeyPatch, unused: Callable[[], str]
) -> None:
    broken = threading.Event()

    def tick(self: object, now: float) -> None:
        if broken.is_set():
            raise RuntimeError("the books are gone")

    monkeypatch.setattr(NoHandover, "tick", tick)
    address = unused()
    serving = asyncio.create_task(serve(settings_of("both", model, listen=address)))
    probe = HealthProbe(address)
    await until(probe, Condition.SERVING)
    async with Gateway(address) as gateway:
        broken.set()
        code, details = await gateway.status()
        assert (code, "failed" in details) == (grpc.StatusCode.UNAVAILABLE, True)
    with pytest.raises(TwostrokeError, match="the books are gone"):
        await asyncio.wait_for(serving, 20)
    await probe.close()


async def test_an_engine_that_hangs_ends_the_process(
    model: Path, monkeypatch: pytest.MonkeyPatch, unused: Callable[[], str]
) -> None:
    hang, gate = threading.Event(), threading.Event()

    def tick(self: object, now: float) -> None:
        if hang.is_set():
            gate.wait()

    monkeypatch.setattr(NoHandover, "tick", tick)
    monkeypatch.setattr(worker_module, "STALL_BEATS", 4)
    address = unused()
    serving = asyncio.create_task(serve(settings_of("both", model, listen=address)))
    probe = HealthProbe(address)
    try:
        await until(probe, Condition.SERVING)
        async with Gateway(address) as gateway:
            hang.set()
            code, details = await gateway.status()
            assert (code, "failed" in details) == (grpc.StatusCode.UNAVAILABLE, True)
        with pytest.raises(TwostrokeError, match="nothing has moved"):
            await asyncio.wait_for(serving, 20)
    finally:
        gate.set()
        await probe.close()
