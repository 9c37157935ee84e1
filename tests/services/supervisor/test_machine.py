"""Cores, memory, ports, health, and the tie to a parent: against the real system."""

import os
import socket
from pathlib import Path

import pytest

from twostroke.services.supervisor import machine


def test_cores_are_those_of_the_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    assert 1 <= machine.cores() <= len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert machine.cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("content", "cores"), [("max 100000", float("inf")), ("150000 100000\n", 1.5), ("garbage", float("inf"))]
)
def test_a_containers_quota(content: str, cores: float, tmp_path: Path) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(content)
    assert machine._cgroup_cores(path) == cores
    assert machine._cgroup_cores(tmp_path / "none") == float("inf")


def test_memory() -> None:
    available, total = machine.memory_bytes()
    assert 0 < available <= total
    assert total > 1 << 28


def test_an_address_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert machine.listen_error(address) == "Address already in use"
    assert machine.listen_error(address) is None
    assert machine.listen_error("192.0.2.1:80") == "Cannot assign requested address"
    assert machine.listen_error("no.such.host.invalid:80")


def test_free_ports_are_different_and_free() -> None:
    ports = machine.free_ports(50)
    assert len(set(ports)) == 50
    assert all(port in machine.PORTS and machine.listen_error(f"127.0.0.1:{port}") is None for port in ports)
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert machine.PORTS.stop <= low


def test_no_free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(machine, "PORTS", range(port, port + 1))
        with pytest.raises(OSError, match="1 free ports wanted"):
            machine.free_ports(1)
