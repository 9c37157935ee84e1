"""Files that are replaced, broken or gone while the process runs."""

import logging
import os
from pathlib import Path

import pytest

from twostroke.errors import ConfigError
from twostroke.services.security.watched_file import LOOK_S, MAX_BYTES, WatchedFiles, read_bounded


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def parse(contents: dict[str, bytes]) -> str:
    text = contents["keys"].decode()
    if text == "broken":
        raise ConfigError("keys: broken")
    return text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("one")
    return path


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watched(path: Path, clock: Clock) -> WatchedFiles[str]:
    return WatchedFiles({"keys": path}, parse, clock=clock)


def test_a_replaced_file_counts_from_the_next_look(watched: WatchedFiles[str], path: Path, clock: Clock) -> None:
    path.write_text("three")
    assert watched.get() == "one"
    clock.now += LOOK_S
    assert watched.get() == "three"


def test_one_of_the_same_size_and_time_that_was_moved_there_counts(
    watched: WatchedFiles[str], path: Path, clock: Clock
) -> None:
    other = path.with_suffix(".new")
    other.write_text("two")
    stamp = path.stat()
    os.utime(other, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    other.replace(path)
    clock.now += LOOK_S
    assert watched.get() == "two"


def test_an_unchanged_file_is_not_read_again(watched: WatchedFiles[str], clock: Clock) -> None:
    first = watched.get()
    for _ in range(3):
        clock.now += LOOK_S
        assert watched.get() is first


@pytest.mark.parametrize("fault", ["broken", "gone", "unreadable"])
def test_what_is_no_good_changes_nothing_and_is_told_once(
    watched: WatchedFiles[str], path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    if fault == "broken":
        path.write_text("broken")
    else:
        path.unlink()
        if fault == "unreadable":
            path.mkdir()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            clock.now += LOOK_S
            assert watched.get() == "one"
    assert len(caplog.records) == 1
    assert "stays in force" in caplog.text
    if path.is_dir():
        path.rmdir()
    path.write_text("mended")
    clock.now += LOOK_S
    assert watched.get() == "mended"


def test_a_link_that_is_turned_over_counts(tmp_path: Path, clock: Clock) -> None:
    """So a mounted secret is renewed."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys").write_text(name)
    (tmp_path / "current").symlink_to(tmp_path / "one")
    watched = WatchedFiles({"keys": tmp_path / "current" / "keys"}, parse, clock=clock)
    (tmp_path / "next").symlink_to(tmp_path / "two")
    (tmp_path / "next").replace(tmp_path / "current")
    clock.now += LOOK_S
    assert watched.get() == "two"


def test_at_the_start_it_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^keys: cannot read .*: No such file") as refused:
        WatchedFiles({"keys": tmp_path / "none"}, parse)
    assert refused.value.field == "keys"


def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 4 MiB"):
        read_bounded(tmp_path / "large", "keys")
    with pytest.raises(ConfigError, match="larger than 4 MiB"):
        read_bounded(Path("/dev/zero"), "keys")
