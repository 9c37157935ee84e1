"""Who may import whom, and what no file of the package may do."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("services", "engine", "kernels", "kvtransfer")
ARROWS = {
    "services": {"services", "engine", "kvtransfer", "v1", "errors", ""},  # "": the package itself, for its version
    "engine": {"engine", "kernels", "errors"},
    "kvtransfer": {"kvtransfer", "kernels", "errors"},
    "kernels": {"kernels"},
}
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import in the file, also those inside of functions."""
    package = ["twostroke", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            yield node.lineno, ".".join(module)
            yield from ((node.lineno, ".".join([*module, alias.name])) for alias in node.names)


def test_imports_are_resolved() -> None:
    """The helper itself: relative imports at both depths."""
    names = {name for _, name in imported(ROOT / "services" / "commands" / "serve.py")}
    assert {"twostroke.errors", "twostroke.services.logs", "twostroke.services.gateway.gateway"} <= names


def test_the_folders_are_links() -> None:
    for folder in FOLDERS:
        link = ROOT / "src" / "twostroke" / folder
        assert link.is_symlink()
        assert link.readlink() == Path("../..") / folder


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    for line, name in imported(path):
        parts = name.split(".")
        if parts[0] in FOLDERS:
            pytest.fail(f"{path}:{line} imports {name}: our folders are imported below twostroke only")
        if parts[0] != "twostroke" or name == "twostroke":
            continue
        target = parts[1] if parts[1] in (*FOLDERS, "v1", "errors") else ""
        assert target in ARROWS[folder], f"{path}:{line} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_forbidden(path: Path) -> None:
    for node in ast.walk(tree(path)):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Assert), f"{where}: python -O drops an assert; raise an error"
        assert not isinstance(node, ast.Global), f"{where}: no module globals"
    modules = {name.split(".")[0] for _, name in imported(path)}
    assert not modules & {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}, path
    assert not [name for _, name in imported(path) if name.startswith("multiprocessing")], path


def test_every_file_says_what_it_is() -> None:
    for path in FILES:
        assert ast.get_docstring(tree(path)), path


def test_kernels_is_no_package_and_stands_alone() -> None:
    assert not list((ROOT / "kernels").rglob("__init__.py"))
    assert ARROWS["kernels"] == {"kernels"}


def test_engine_init_imports_nothing() -> None:
    assert not list(imported(ROOT / "engine" / "__init__.py"))


@pytest.mark.parametrize(
    "modules",
    [
        "engine.tokenizer engine.detokenizer engine.models engine.model_config engine.request",
        "services.gateway.gateway",
        "services.cli services.supervisor.up services.client.client",
    ],
)
def test_what_a_gateway_needs_does_not_import_torch(modules: str) -> None:
    lines = [f"import twostroke.{name}" for name in modules.split()]
    lines.append("import sys; print(sorted(m for m in sys.modules if m in ('torch', 'transformers', 'triton')))")
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_help_needs_neither_torch_nor_grpc() -> None:
    code = (
        "import sys\nfrom twostroke.services.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'grpc', 'numpy', 'tokenizers') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
