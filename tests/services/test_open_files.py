"""A gateway may have as many files open as the system lets it."""

import subprocess
import sys

SCRIPT = """
import resource
from twostroke.services.open_files import allow_open_files
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
assert allow_open_files() == hard
assert allow_open_files() == hard
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))
"""


def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    assert subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True).stdout == "True\n"
