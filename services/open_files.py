"""How many files, and so connections, a process may have open."""

import resource


def allow_open_files() -> int:
    """As many as the system lets this process have; returns their number. Out of the box it is 1024 at many places,
    which clients that connect and say nothing would use up; the bounds on connections are to hold before that one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
