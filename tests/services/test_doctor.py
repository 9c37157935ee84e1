"""What the doctor finds here, and what it would find elsewhere."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from twostroke import __version__
from twostroke.services import doctor
from twostroke.services.cli import main
from twostroke.services.doctor import Finding, examine


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def found(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name.startswith(name))


def test_this_machine(tmp_path: Path, taken: str) -> None:
    findings = examine(listen=taken, models_dir=tmp_path, shm_dir=tmp_path)
    assert found(findings, "twostroke").value == __version__
    for name in ("python", "grpcio", "torch", "pidfd", "safetensors", "gpu"):
        assert found(findings, name).verdict == "ok", name
    port = found(findings, "port")
    assert (port.verdict, port.value) == ("warning", "Address already in use")
    assert "--listen" in port.remedy
    assert found(findings, "models").remedy == "twostroke models pull"
    assert len({finding.name for finding in findings}) == len(findings)
    assert all(finding.remedy for finding in findings if finding.verdict != "ok")


def test_what_is_missing_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(doctor, "memory_bytes", lambda: (1 << 30, 2 << 30))
    monkeypatch.setattr(doctor, "cores", lambda: 1)
    findings = examine(listen="127.0.0.1:0", models_dir=tmp_path, shm_dir=tmp_path / "none")
    verdicts = {name: found(findings, name).verdict for name in ("pidfd", "shm", "memory", "cores", "port")}
    assert verdicts == {"pidfd": "missing", "shm": "missing", "memory": "warning", "cores": "warning", "port": "ok"}
    assert all(finding.remedy for finding in findings if finding.verdict != "ok")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_SHM_DIR", str(tmp_path))
    monkeypatch.setenv("TWOSTROKE_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("TWOSTROKE_LISTEN", "127.0.0.1:0")
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    findings = json.loads(result.output)
    assert {"name", "verdict", "value", "remedy"} == findings[0].keys()
    assert next(f for f in findings if f["name"] == f"shm ({tmp_path})")["verdict"] in ("ok", "warning")
    shown = CliRunner().invoke(main, ["doctor"])
    assert shown.exit_code == 0
    assert "pidfd" in shown.output
    monkeypatch.setenv("TWOSTROKE_SHM_DIR", str(tmp_path / "none"))
    failed = CliRunner().invoke(main, ["doctor"])
    assert failed.exit_code == 1
    assert "--shm-dir" in failed.output
