"""Pools in mapped files."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from twostroke.errors import ConfigError, Mismatch, Unavailable
from twostroke.kvtransfer import shm
from twostroke.kvtransfer.shm import HEADER_BYTES, SharedPool, file_name, sweep

N, SIZE = 0xAB, 3 * 4096 + 24


def test_both_sides_see_the_same_bytes(tmp_path: Path) -> None:
    mine = SharedPool.create(tmp_path, SIZE, incarnation=N)
    assert mine.tensor.shape == (SIZE,)
    assert mine.tensor.dtype == torch.uint8
    assert not mine.tensor.any()
    assert mine.tensor.data_ptr() % 64 == 0
    theirs = SharedPool.open(mine.descriptor, incarnation=N, nbytes=SIZE)
    theirs.tensor[:] = torch.arange(SIZE) % 251
    assert torch.equal(mine.tensor, (torch.arange(SIZE) % 251).to(torch.uint8))
    assert theirs.tensor.view(torch.bfloat16).shape == (SIZE // 2,)
    theirs.close()
    assert Path(os.fsdecode(mine.descriptor)).exists()
    mine.close()
    mine.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="closed"):
        _ = mine.tensor


def test_a_tensor_keeps_the_mapping_only_as_long_as_it_lives(tmp_path: Path) -> None:
    def mapped() -> bool:
        return file_name(N) in Path("/proc/self/maps").read_text()

    pool = SharedPool.create(tmp_path, SIZE, incarnation=N)
    kept = pool.tensor.view(torch.float32)[:3]
    pool.close()
    kept.fill_(1.5)
    assert mapped()
    del kept
    assert not mapped()


def test_the_file_is_private_and_its_room_is_taken_at_once(tmp_path: Path) -> None:
    pool = SharedPool.create(tmp_path, SIZE, incarnation=N)
    status = os.stat(os.fsdecode(pool.descriptor))
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= HEADER_BYTES + SIZE
    with pytest.raises(ConfigError, match="File exists") as caught:
        SharedPool.create(tmp_path, SIZE, incarnation=N)
    assert caught.value.field == "shm_dir"
    pool.close()


def test_a_full_directory_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no room for .* MiB"):
        SharedPool.create(Path("/dev/shm"), 1 << 50, incarnation=N)
    assert not (Path("/dev/shm") / file_name(N)).exists()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="No space left"):
        SharedPool.create(tmp_path, SIZE, incarnation=N)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        SharedPool.create(tmp_path / "no", SIZE, incarnation=N)
    with pytest.raises(ValueError, match="at least one byte"):
        SharedPool.create(tmp_path, 0, incarnation=N)
    assert sweep(tmp_path / "no") == 0


@pytest.mark.parametrize("call", ["open", "madvise"])
def test_what_is_lacking_for_a_moment_is_no_mismatch(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = SharedPool.create(tmp_path, SIZE, incarnation=N)

    def lacking(*_: object) -> None:
        raise OSError(errno.EMFILE if call == "open" else errno.ENOMEM, "not now")

    if call == "open":
        monkeypatch.setattr(os, "open", lacking)
    else:
        monkeypatch.setattr(shm, "_populate", lacking)
    with pytest.raises(Unavailable, match="not now"):
        SharedPool.open(pool.descriptor, incarnation=N, nbytes=SIZE)
    pool.close()


def test_other_threads_run_while_a_large_pool_is_mapped(tmp_path: Path) -> None:
    """Else a process that meets a large pool is silent for so long that its peers take it for frozen."""
    nbytes = 256 << 20
    beats, begun, over = 0, threading.Event(), threading.Event()

    def beat() -> None:
        nonlocal beats
        while not over.wait(0.001):
            beats += 1
            begun.set()

    with (tmp_path / "pool").open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, HEADER_BYTES + nbytes)
        thread = threading.Thread(target=beat)
        thread.start()
        try:
            begun.wait()
            before = beats
            mapping = shm._map(file.fileno(), nbytes)
            assert beats - before >= 4
        finally:
            over.set()
            thread.join()
    resident = next(line for line in _mapping_of("pool") if line.startswith("Rss:"))
    assert int(resident.split()[1]) >= nbytes >> 10
    mapping.close()


def _mapping_of(name: str) -> list[str]:
    """What the kernel says of the mapping of a file of that name."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith(f"/{name}"))
    return lines[start : start + 10]


def test_an_old_kernel_maps_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "_MADV_POPULATE_WRITE", 12345)
    pool = SharedPool.create(tmp_path, SIZE, incarnation=N)
    pool.tensor.fill_(3)
    pool.close()


def test_descriptors_are_not_trusted(tmp_path: Path) -> None:
    pool = SharedPool.create(tmp_path, SIZE, incarnation=N)
    path = Path(os.fsdecode(pool.descriptor))
    other = tmp_path / file_name(N + 1)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / file_name(N)).symlink_to(path)
    other.write_bytes(path.read_bytes())
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / file_name(N))
    bad: list[tuple[bytes, int, int]] = [
        (file_name(N).encode(), N, SIZE),
        (b"", N, SIZE),
        (b"/etc/passwd", N, SIZE),
        (bytes(path) + b"\0", N, SIZE),
        (bytes(path.parent) + b"/x/../" + path.name.encode(), N, SIZE),
        (b"/" + b"a/" * 5000 + path.name.encode(), N, SIZE),
        (bytes(tmp_path / "d" / file_name(N)), N, SIZE),
        (bytes(tmp_path / "pipe" / file_name(N)), N, SIZE),
        (bytes(tmp_path / "none" / file_name(N)), N, SIZE),
        (bytes(other), N + 1, SIZE),  # the header names another incarnation
        (bytes(path), N + 1, SIZE),
        (bytes(path), N, SIZE + 8),
        (bytes(path), N, SIZE - 8),
        (b"\xff\xfe/" + path.name.encode(), N, SIZE),
    ]
    for descriptor, incarnation, nbytes in bad:
        with pytest.raises(Mismatch):
            SharedPool.open(descriptor, incarnation=incarnation, nbytes=nbytes)
    pool.close()


OWNER = """
import sys, time
from pathlib import Path
from twostroke.kvtransfer.shm import SharedPool
pool = SharedPool.create(Path(sys.argv[1]), 4096, incarnation=7)
print("ready", flush=True)
sys.stdin.read()
"""


def test_sweep_removes_files_of_the_dead_only(tmp_path: Path) -> None:
    (tmp_path / "twostroke-notes.txt").write_text("mine")
    (tmp_path / file_name(9)).symlink_to(tmp_path / "twostroke-notes.txt")
    live = SharedPool.create(tmp_path, SIZE, incarnation=N)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        assert sweep(tmp_path) == 0
        theirs = SharedPool.open(bytes(tmp_path / file_name(7)), incarnation=7, nbytes=4096)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    theirs.tensor.fill_(1)  # a pool outlives its owner for those who mapped it
    theirs.close()
    assert sweep(tmp_path) == 1
    assert {p.name for p in tmp_path.iterdir()} == {"twostroke-notes.txt", file_name(9), file_name(N)}
    live.close()
