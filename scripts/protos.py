"""Generates twostroke.v1 from protos/ below the given folder (`make protos`: src)."""

import sys
import sysconfig
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).parent.parent / "protos"


def generate(target: Path) -> None:
    """Writes modules, gRPC stubs and their types; SystemExit with the compiler's status where it fails."""
    target.mkdir(parents=True, exist_ok=True)
    scripts = Path(sysconfig.get_path("scripts"))
    plugins = [f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    outputs = [f"--python_out={target}", f"--grpc_python_out={target}", f"--mypy_out={target}"]
    outputs.append(f"--mypy_grpc_out=only_async:{target}")
    sources = sorted(str(path) for path in PROTOS.glob("twostroke/v1/*.proto"))
    if status := protoc.main(["protoc", f"-I{PROTOS}", *plugins, *outputs, *sources]):
        raise SystemExit(status)


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
