"""Where compiled GPU kernels are kept from one process to the next."""

import importlib.metadata
import logging
import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

log = logging.getLogger(__name__)

VARIABLE = "TRITON_CACHE_DIR"


def use_compile_cache(home: Path | None = None, environment: MutableMapping[str, str] | None = None) -> Path:
    """Points Triton at a folder below ~/.cache/twostroke, one a version of Triton and torch; before the first kernel.

    Any number of processes may share it: Triton names an entry by all that its kernel depends on and puts it in place
    by renaming a finished file, so that two that compile the same one at once both succeed, and nobody reads half of
    it. A folder that TRITON_CACHE_DIR names already stays. Where none can be made, kernels are compiled for this
    process alone. `home`, `environment`: for tests.
    """
    variables = os.environ if environment is None else environment
    if given := variables.get(VARIABLE):
        return Path(given)
    try:
        path = (home or Path.home()) / ".cache" / "twostroke" / "triton" / _versions()
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(f"{path} cannot be written to")
    except (OSError, RuntimeError) as error:  # the latter: a user without a home
        path = Path(tempfile.mkdtemp(prefix="twostroke-triton-"))
        log.warning("compiled kernels are not kept (%s); %s names a folder for them", error, VARIABLE)
    variables[VARIABLE] = str(path)
    return path


def _versions() -> str:
    """'triton-3.6.0-torch-2.11.0'; a local part (+cu130) counts, as its compiler may be another."""
    return "-".join(f"{name}-{_version(name)}" for name in ("triton", "torch"))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name).replace("/", "_")
    except importlib.metadata.PackageNotFoundError:
        return "none"
