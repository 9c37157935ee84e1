"""What stands before a worker that no supervisor started: passes signals on, starts it anew when it changes its role.

It imports next to nothing and does nothing else; a worker that dies is not started again here (systemd, Docker,
Kubernetes and `twostroke up` do that), its exit code becomes the launcher's.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from ..worker.role_change import EXIT_CODES, successors

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SIGNAL_EXIT = 128  # a shell's way to tell of a death by signal


class Launcher:
    """Runs one worker after another, until one ends for good."""

    def __init__(self, role: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """`words`: what follows the role on the command line."""
        command = (sys.executable, "-m", "twostroke.services.cli")
        self._next = successors(command, (*words, "--parent", str(os.getpid())))
        self._code = EXIT_CODES[role]
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._told = False

    def run(self) -> int:
        """The exit code of the last one."""
        for number in SIGNALS:
            signal.signal(number, self._pass_on)
        code = self._code
        while code in self._next and not self._told:
            code = self._run_once(self._next[code])
        if code in self._next:
            return 0  # it was told to end while it changed
        return code if code >= 0 else SIGNAL_EXIT - code

    def _run_once(self, arguments: Sequence[str]) -> int:
        # A session of its own: Ctrl-C in the terminal would reach it twice, and a second one ends it at once.
        self._process = subprocess.Popen(arguments, env=self._environment, start_new_session=True)
        if self._told:  # while it was being made
            self._process.terminate()
        return self._process.wait()

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self._told = True
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
