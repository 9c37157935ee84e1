"""Where compiled kernels are kept; on a GPU, that two processes that compile the same kernel at once both succeed."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twostroke.engine.compile_cache import VARIABLE, use_compile_cache


def test_a_folder_of_its_own_for_each_version(tmp_path):
    environment: dict[str, str] = {}
    path = use_compile_cache(tmp_path, environment)
    assert path.is_dir()
    assert path.parent == tmp_path / ".cache" / "twostroke" / "triton"
    assert path.name.startswith("triton-")
    assert "-torch-2." in path.name
    assert environment == {VARIABLE: str(path)}
    assert use_compile_cache(tmp_path, {}) == path


def test_a_folder_that_was_named_stays(tmp_path):
    environment = {VARIABLE: "/somewhere"}
    assert use_compile_cache(tmp_path, environment) == Path("/somewhere")
    assert environment == {VARIABLE: "/somewhere"}
    assert not any(tmp_path.iterdir())


def test_where_none_can_be_made_this_process_compiles_for_itself(tmp_path, caplog):
    (tmp_path / ".cache").write_text("no folder")
    environment: dict[str, str] = {}
    with caplog.at_level(logging.WARNING):
        path = use_compile_cache(tmp_path, environment)
    try:
        assert environment[VARIABLE] == str(path)
        assert path.is_dir()
        assert VARIABLE in caplog.text
    finally:
        path.rmdir()


def test_a_user_without_a_home_compiles_for_itself(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("~nobody-by-this-name").expanduser())
    path = use_compile_cache(None, {})
    assert path.is_dir()
    path.rmdir()


KERNEL = """
import sys, torch, triton, triton.language as tl

@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

for block in (128, 256, 512, 1024):
    x = torch.arange(100, device="cuda", dtype=torch.float32)
    double[(1,)](x, 100, BLOCK=block)
    assert torch.equal(x.cpu(), torch.arange(100.0) * 2)
"""


@pytest.mark.gpu
def test_processes_share_it(tmp_path):
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)
    path = use_compile_cache(tmp_path, {})
    environment = {**os.environ, VARIABLE: str(path)}
    environment.pop("TRITON_INTERPRET", None)
    running = [subprocess.Popen([sys.executable, str(script)], env=environment) for _ in range(4)]
    assert [process.wait(timeout=100) for process in running] == [0] * 4
    made = {file for file in path.rglob("*") if file.is_file()}
    assert made
    subprocess.run([sys.executable, str(script)], env=environment, check=True)
    assert {file for file in path.rglob("*") if file.is_file()} == made, "compiled again"
