"""Who this process is among the others: drawn once at start, told in every handshake."""

import os
import secrets
from dataclasses import dataclass

from ..errors import Mismatch
from ..v1 import worker_pb2

PROTOCOL = 2


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """`incarnation` is random and never 0; `host` is `kvtransfer.process.host_id()`: equal where pids compare."""

    incarnation: int
    name: str
    pid: int
    host: str

    def message(self) -> worker_pb2.Identity:
        """As it goes over the wire."""
        return worker_pb2.Identity(
            protocol=PROTOCOL, incarnation=self.incarnation, name=self.name, pid=self.pid, host=self.host
        )


def draw_identity(name: str, host: str) -> ProcessIdentity:
    """A fresh incarnation of this process."""
    return ProcessIdentity(secrets.randbits(64) or 1, name, os.getpid(), host)


def read_identity(message: worker_pb2.Identity) -> ProcessIdentity:
    """A peer's identity. Mismatch where it speaks another protocol version or names no incarnation."""
    if message.protocol != PROTOCOL:
        raise Mismatch(f"protocol version {PROTOCOL} here, {message.protocol} there")
    if message.incarnation == 0:
        raise Mismatch("the peer names no incarnation")
    return ProcessIdentity(message.incarnation, message.name, message.pid, message.host)
