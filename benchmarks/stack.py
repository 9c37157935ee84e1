"""A whole stack of processes for a benchmark, started by `twostroke up` and used through the public API."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import psutil

from twostroke.services.supervisor.machine import free_ports
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import inference_pb2_grpc as rpc

ALWAYS = ("--disaggregate", "always")  # what is measured is the hand-over; a later flag overrides it


@dataclass
class Running:
    """A stack that answers."""

    address: str
    process: subprocess.Popen[bytes]
    stub: rpc.InferenceStub

    def generate(self, token_ids: list[int], *, max_tokens: int) -> pb.Finish:
        """One greedy request, read to its end."""
        request = pb.GenerateRequest(
            input=pb.Input(token_ids=pb.TokenIds(ids=token_ids)),
            sampling=pb.Sampling(temperature=0.0),
            stopping=pb.Stopping(max_tokens=max_tokens, ignore_eos=True),
        )
        *_, last = self.stub.Generate(request, timeout=120)
        return last.finish

    def idle_share(self, seconds: float) -> dict[str, float]:
        """Share of a core that each process of the stack takes while nothing is asked."""
        processes = [self.process_info(), *self.process_info().children(recursive=True)]
        before = {p.pid: sum(p.cpu_times()[:2]) for p in processes}
        time.sleep(seconds)
        return {self._name(p): (sum(p.cpu_times()[:2]) - before[p.pid]) / seconds for p in processes}

    def process_info(self) -> psutil.Process:
        """The supervisor."""
        return psutil.Process(self.process.pid)

    @staticmethod
    def _name(process: psutil.Process) -> str:
        words = process.cmdline()
        return next((word for word in words if word in ("up", "gateway", "prefill", "decode", "both")), words[-1])


@contextlib.contextmanager
def running(model: str, *flags: str, timeout_s: float = 120) -> Iterator[Running]:
    """Starts gateway, one prefill and one decode worker on free ports and waits until they serve."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    words = ("up", "--model", model, "--listen", address, *ALWAYS, *flags)
    command = [sys.executable, "-m", "twostroke.services.cli", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with grpc.insecure_channel(address) as channel:
            stub = rpc.InferenceStub(channel)
            deadline = time.monotonic() + timeout_s
            while True:
                with contextlib.suppress(grpc.RpcError):
                    model_info = stub.GetModel(pb.GetModelRequest(), timeout=2, wait_for_ready=True)
                    if model_info.prefill_workers and model_info.decode_workers:
                        break
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError(f"the stack did not come up: {' '.join(command)}")
                time.sleep(0.2)
            yield Running(address, process, stub)
    finally:
        process.terminate()
        process.wait(60)
