"""What this machine gives a process: cores, memory, free ports."""

import errno
import os
import random
import socket
from pathlib import Path

from ..settings import split_address

PORTS = range(20_000, 32_000)  # below the range from which the kernel draws ports of outgoing connections


def _cgroup_cores(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Cores that the control group (version 2) allows; infinity where it sets no limit."""
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


def cores() -> int:
    """Cores that this process may use: its affinity, cut by its container's quota; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, int(min(_cgroup_cores(), 1 << 16))))


def memory_bytes() -> tuple[int, int]:
    """(available, total) bytes of memory; zeros where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) << 10, int(lines["MemTotal"].split()[0]) << 10
    except (OSError, KeyError, ValueError, IndexError):
        return 0, 0


def visible_gpus() -> int:
    """GPUs that a process started now could use; asked without a context on any of them."""
    from torch.cuda import device_count  # seconds, which a stack without GPUs does not spend

    return device_count()


def listen_error(address: str) -> str | None:
    """Why a server could not listen on host:port now; None where it could."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), port))
    except OSError as error:
        return None if error.errno == errno.EAFNOSUPPORT else error.strerror or str(error)
    return None


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports that are free now, drawn at random so that two callers hardly meet; OSError if too few.

    They lie outside of the ephemeral range: a worker that is down for a moment must find its port free again.
    """
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        if listen_error(f"{host}:{port}") is None:
            found.append(port)
    if len(found) < count:
        raise OSError(f"{count} free ports wanted between {PORTS.start} and {PORTS.stop}, {len(found)} found")
    return found
