"""Children die with their supervisor, whatever killed it."""

import os
import select
import subprocess
import sys

CHILD = """
import os, sys, time
from twostroke.services.supervisor.parent import die_with
die_with(int(sys.argv[1]))
print("tied", os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())], start_new_session=True)
time.sleep(60)
"""


def test_the_kernel_kills_the_child_of_a_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    word, pid = parent.stdout.readline().split()
    assert word == "tied"
    child = os.pidfd_open(int(pid))
    try:
        assert not select.select([child], [], [], 0)[0]
        parent.kill()
        parent.wait()
        assert select.select([child], [], [], 10)[0], "the child lives on"
    finally:
        os.close(child)
        parent.stdout.close()


def test_a_parent_that_is_gone() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, "999999999"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "parent: got 999999999" in done.stderr


def test_the_message() -> None:
    code = "from twostroke.services.supervisor.parent import die_with; die_with(1 << 30)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"takes the supervisor's process id, {os.getpid()}" in done.stderr
    assert "ConfigError" in done.stderr
