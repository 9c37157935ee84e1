"""Builds the environments of the clients that tests/clients/ runs (`make clients`): one folder each below .clients/.

A client has needs of its own (an older protobuf, another language), so it never shares the product's environment.
tests/clients/environments/NAME.txt pins the packages of a virtual environment; tests/clients/environments/NAME/ holds a
package.json with its lock for npm. To add a client, add one of these.
"""

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
WANTED = ROOT / "tests" / "clients" / "environments"
BUILT = ROOT / ".clients"
STAMP = ".built"  # its text is the digest of what was asked for; it is written last


def digest(wanted: Path) -> str:
    """Of the file, or of the folder's files."""
    files = sorted(path for path in wanted.iterdir() if path.is_file()) if wanted.is_dir() else [wanted]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def build(wanted: Path, folder: Path) -> None:
    """From nothing. CalledProcessError where the installer fails."""
    shutil.rmtree(folder, ignore_errors=True)
    if wanted.is_dir():
        shutil.copytree(wanted, folder)
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=folder, check=True)
    else:
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-q", "-r", str(wanted)], check=True)
        subprocess.run([*pip, "check"], check=True)


def main(names: list[str]) -> None:
    """Builds what is missing or was asked for otherwise; `names`: only these. SystemExit for a name that is unknown."""
    known = {wanted.stem: wanted for wanted in sorted(WANTED.iterdir())}
    if unknown := set(names) - known.keys():
        raise SystemExit(f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    BUILT.mkdir(exist_ok=True)
    for name in names or known:
        wanted, folder = known[name], BUILT / name
        if wanted.is_dir() and shutil.which("npm") is None:
            print(f"{name}: needs npm, which is not here; its tests will be skipped")
            continue
        stamp = folder / STAMP
        if stamp.exists() and stamp.read_text() == digest(wanted):
            continue
        print(f"{name}: building {folder.relative_to(ROOT)}", flush=True)
        build(wanted, folder)
        stamp.write_text(digest(wanted))


if __name__ == "__main__":
    main(sys.argv[1:])
