"""What stands before a worker: exit codes, roles, signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twostroke.services.worker.role_change import EXIT_CODES, successors

CHILD = """
import os, signal, sys, time
journal = open(sys.argv[1], "a")
print(*sys.argv[2:], os.getppid(), file=journal, flush=True)
role, plan = sys.argv[2], sys.argv[3].split(",")
step = plan[sum(1 for _ in open(sys.argv[1])) - 1]
if step == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    print("ready", file=journal, flush=True)
    time.sleep(30)
if step == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(step))
"""
LAUNCHER = """
import os, sys
from twostroke.services.supervisor import launcher
child, journal, role, plan = sys.argv[1:]
sys.executable = sys.executable
it = launcher.Launcher(role, (plan,), dict(os.environ))
it._next = launcher.successors((sys.executable, child, journal), (plan,))
sys.exit(it.run())
"""


def launched(tmp_path: Path, role: str, plan: str) -> tuple["subprocess.Popen[bytes]", Path]:
    child, journal = tmp_path / "child.py", tmp_path / "journal"
    child.write_text(CHILD)
    journal.touch()
    words = [sys.executable, "-c", LAUNCHER, str(child), str(journal), role, plan]
    return subprocess.Popen(words), journal


def test_arguments_by_exit_code() -> None:
    assert set(EXIT_CODES) == {"prefill", "decode", "both"}
    found = successors(("python", "-m", "x"), ("--listen", "y"))
    assert found[EXIT_CODES["decode"]] == ("python", "-m", "x", "decode", "--listen", "y")
    assert len(found) == 3


@pytest.mark.parametrize(("plan", "code"), [("0", 0), ("2", 2), ("die", 137), ("71,73,0", 0), ("72,1", 1)])
def test_roles_follow_one_another_until_an_end(tmp_path: Path, plan: str, code: int) -> None:
    process, journal = launched(tmp_path, "decode", plan)
    assert process.wait(30) == code
    lines = [line.split() for line in journal.read_text().splitlines()]
    names = {str(number): name for name, number in EXIT_CODES.items()}
    assert [line[0] for line in lines] == ["decode", *(names[step] for step in plan.split(",")[:-1])]
    assert {line[-1] for line in lines} == {str(process.pid)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_worker_once(tmp_path: Path, number: signal.Signals) -> None:
    process, journal = launched(tmp_path, "both", "wait")
    while "ready" not in journal.read_text():
        time.sleep(0.02)
    os.kill(process.pid, number)
    assert process.wait(30) == (5 if number is signal.SIGTERM else 130)
