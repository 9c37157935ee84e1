"""Processes of this host, held by pidfd: the proof of a peer's death, and the means to fence a frozen one.

A pid may be taken over by another process; a pidfd (Linux 5.3, pidfd_open(2)) never is. Open it while the peer is known
to live, during the handshake.
"""

import os
import select
import signal
from contextlib import suppress
from pathlib import Path


def host_id() -> str:
    """Names the running kernel and the PID namespace: equal in two processes only where their pids can be compared."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


class ProcessHandle:
    """One process, whatever becomes of its pid. `fileno()` turns readable when it ends, for `loop.add_reader`."""

    def __init__(self, descriptor: int, pid: int) -> None:
        """Takes over `descriptor`, a pidfd of process `pid`."""
        self._descriptor = descriptor
        self.pid = pid

    @classmethod
    def open(cls, pid: int, host: str) -> "ProcessHandle | None":
        """A handle on process `pid` of `host` (its `host_id()`); None where it is elsewhere, gone, or unknowable."""
        if pid <= 0 or host != host_id():
            return None
        try:
            return cls(os.pidfd_open(pid), pid)
        except OSError:  # no such process, or a kernel or sandbox without pidfds
            return None

    def fileno(self) -> int:
        """The pidfd; -1 once closed."""
        return self._descriptor

    def alive(self) -> bool:
        """False once the process has ended, its threads and their writes with it (a zombie has ended).

        Raises ValueError once closed.
        """
        if self._descriptor < 0:
            raise ValueError("the handle is closed")
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return not poll.poll(0)

    def kill(self) -> bool:
        """Sends SIGKILL; False when the process has ended already. Raises PermissionError for another user's."""
        if self._descriptor < 0:
            raise ValueError("the handle is closed")
        try:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Gives the pidfd back. May be called again."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
