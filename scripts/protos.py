"""Generates the modules of protos/ below the given folder (`make protos`: src), all of them inside of twostroke."""

import sys
import sysconfig
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).parent.parent / "protos"
PACKAGES = {"twostroke/v1": "twostroke/v1", "inference": "twostroke/oip", "smg": "twostroke/smg"}
"""Folder of .proto files and of their modules: protocols of others keep their names on the wire, not in Python."""


def generate(target: Path) -> None:
    """Writes modules, gRPC stubs and their types; SystemExit with the compiler's status where it fails."""
    target.mkdir(parents=True, exist_ok=True)
    scripts = Path(sysconfig.get_path("scripts"))
    plugins = [f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    outputs = [f"--python_out={target}", f"--grpc_python_out={target}", f"--mypy_out={target}"]
    outputs.append(f"--mypy_grpc_out=only_async:{target}")
    paths = [f"-I{package}={PROTOS / folder}" for folder, package in PACKAGES.items()]
    sources = sorted(str(path) for folder in PACKAGES for path in (PROTOS / folder).glob("*.proto"))
    if status := protoc.main(["protoc", *paths, *plugins, *outputs, *sources]):
        raise SystemExit(status)


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
