"""A worker whose transfers are free: pages are declared to be there. What it answers is worthless, its times are not.

`python benchmarks/null_worker.py prefill ...`: as `twostroke prefill ...`; both halves of a pair must be such.
"""

from collections.abc import Callable, Sequence

from twostroke.kvtransfer import cuda_digester, cuda_ipc, pool_pages, transport
from twostroke.kvtransfer.messages import Copy, Verify
from twostroke.kvtransfer.pool_pages import Digested
from twostroke.kvtransfer.push import DIGEST_BYTES
from twostroke.kvtransfer.transport import Done
from twostroke.services.cli import main


def start(self: object, copy: Copy, done: Done) -> None:
    """Copies nothing."""
    done(copy.copy, bytes(DIGEST_BYTES * len(copy.src)))


def start_layers(self: object, copies: Sequence[Copy], done: Callable[[bytes], None]) -> None:
    """As little."""
    done(bytes(DIGEST_BYTES * sum(len(copy.src) for copy in copies)))


def digest(self: object, verify: Verify, digested: Digested) -> None:
    """Reads nothing."""
    digested(bytes(DIGEST_BYTES * verify.layers * len(verify.pages)))


def patch() -> None:
    """Every way on which pages go, and every way in which they are checked."""
    for sender in (cuda_ipc.CudaIpcTransport, transport.ShmTransport):
        sender.start = start  # type: ignore[method-assign]
    cuda_ipc.CudaIpcTransport.start_layers = start_layers  # type: ignore[method-assign]
    for checker in (cuda_digester.CudaDigester, pool_pages.CpuDigester):
        checker.start = digest  # type: ignore[method-assign]


if __name__ == "__main__":
    patch()
    main()
