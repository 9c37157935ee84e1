"""Gateway and two workers on devices of one's choice, as processes, for the benchmarks of prefill and decode apart."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import grpc
import tokenizers

from twostroke.services.supervisor.machine import free_ports
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import inference_pb2_grpc as rpc

ROLES: Mapping[str, tuple[str, ...]] = {
    "colocated": ("both", "both"),
    "disaggregated": ("prefill", "decode"),
    "null": ("prefill", "decode"),
    "timed": ("prefill", "decode"),
    "one": ("both",),
}
START_S = 240.0
CLI = ("-m", "twostroke.services.cli")
PROGRAMS: Mapping[str, tuple[str, ...]] = {  # of the workers, where it is not the command itself
    mode: (str(Path(__file__).with_name(f"{mode}_worker.py")),) for mode in ("null", "timed")
}


def model_directory(config: Path, directory: Path, **changes: Any) -> Path:
    """A model without weights: the sizes of `config` but for `changes`, and a tokenizer whose texts do not matter."""
    sizes = json.loads((config / "config.json" if config.is_dir() else config).read_text())
    (directory / "config.json").write_text(json.dumps({**sizes, **changes}))
    words = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(directory / "tokenizer.json"))
    return directory


def add_arguments(parser: argparse.ArgumentParser, config: Path) -> None:
    """Of a benchmark with such a stack. `config`: of the model, by default."""
    parser.add_argument("--devices", nargs="+", default=["cuda:0", "cuda:1"], help="of the workers")
    parser.add_argument("--config", type=Path, default=config, help="a config.json, or a directory with one")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 4096, 8192, 16384])
    parser.add_argument("--worker", nargs=argparse.REMAINDER, default=[], help="last: flags for the workers")
    parser.add_argument("--logs", type=Path, help="folder for what the processes say")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append records here, not to results/gpu.jsonl")


class Stack:
    """Processes that end with this one."""

    def __init__(self, logs: Path) -> None:
        """`logs`: folder of their output."""
        self._logs = logs
        self._processes: list[subprocess.Popen[bytes]] = []
        self._files: list[IO[bytes]] = []

    def start(self, name: str, *words: str) -> None:
        """`words`: behind `python`."""
        file = (self._logs / f"{name}.log").open("ab")
        self._files.append(file)
        command = [sys.executable, *words, "--parent", str(os.getpid())]
        self._processes.append(subprocess.Popen(command, stdout=file, stderr=file))

    def check(self) -> None:
        """RuntimeError, with what they said last, when one has ended."""
        for process, file in zip(self._processes, self._files, strict=True):
            if process.poll() is not None:
                said = Path(file.name).read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{Path(file.name).stem} ended with {process.returncode}:\n{said}")

    def stop(self) -> None:
        """Twice asked, they end at once."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for file in self._files:
            file.close()


@contextlib.contextmanager
def running(
    mode: str, model: Path, devices: Sequence[str], logs: Path, worker: Sequence[str] = (), gateway: Sequence[str] = ()
) -> Iterator[str]:
    """The gateway's address, once all serve. `devices`: of each worker of `mode` in turn; flags for all workers and for
    the gateway follow.
    """
    stack = Stack(logs)
    roles = ROLES[mode]
    try:
        ports = free_ports(len(roles) + 1)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        for number, role in enumerate(roles):
            program = PROGRAMS.get(mode, CLI)
            place = ("--listen", addresses[number], "--device", devices[number % len(devices)])
            stack.start(f"{mode}-{role}-{number}", *program, role, *place, "--model", str(model),
                        "--load-format", "dummy", *worker)  # fmt: skip
        stack.start(f"{mode}-gateway", *CLI, "gateway", "--listen", addresses[-1], "--model", str(model),
                    "--workers", ",".join(addresses[:-1]), "--disaggregate", "always", *gateway)  # fmt: skip
        _await(stack, addresses[-1], roles)
        yield addresses[-1]
        stack.check()
    finally:
        stack.stop()


def _await(stack: Stack, address: str, roles: Sequence[str]) -> None:
    """Until all workers are ready."""
    wanted = (sum(role != "decode" for role in roles), sum(role != "prefill" for role in roles))
    until = time.monotonic() + START_S
    with grpc.insecure_channel(address) as channel:
        stub = rpc.InferenceStub(channel)
        while True:
            stack.check()
            with contextlib.suppress(grpc.RpcError):
                model = stub.GetModel(pb.GetModelRequest(), timeout=2, wait_for_ready=True)
                if (model.prefill_workers, model.decode_workers) == wanted:
                    return
            if time.monotonic() > until:
                raise RuntimeError(f"the stack did not come up within {START_S:g} s")
            time.sleep(0.2)
