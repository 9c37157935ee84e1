"""Ties a child process to its supervisor."""

import ctypes
import os
import signal
import sys

from ...errors import ConfigError

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """From now on the kernel kills this process as soon as `parent` is gone, however it went.

    Called by the child itself, early: code between fork and exec would run in a copy of a process with threads.
    SIGKILL, because a supervisor that is gone cannot end a child that does not drain; peers see the death at once.
    Raises ConfigError where the parent is gone already, or is not the process named.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != parent:  # it died before prctl, whose signal will never come
        actual = os.getppid()
        raise ConfigError(f"parent: got {parent}, takes the supervisor's process id, {actual}", field="parent")
