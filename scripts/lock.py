"""Renews constraints.txt: installs the project and its dev extra into an empty environment, writes what pip chose."""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAD = "# Locked versions of all that a checkout installs, for Python 3.11 and later on Linux. Renew: make lock\n"
TORCH = "torch==2.13.0"  # chosen by hand: the newest that the kernels were tried on


def main(target: Path) -> None:
    """Local version labels (`+cpu`) are dropped: the same pin must fit any build."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", TORCH, f"{ROOT}[dev]"], check=True)
        subprocess.run([*pip, "check"], check=True)
        frozen = subprocess.run(
            [*pip, "freeze", "--all", "--exclude", "pip", "--exclude", "twostroke"], check=True, capture_output=True
        )
    lines = [line.split("+")[0] for line in frozen.stdout.decode().splitlines()]
    target.write_text(HEAD + "\n".join(sorted(lines, key=str.lower)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
