"""Models of the Hugging Face hub, through `huggingface_hub` and its cache."""

import os
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import ConfigError
from .gguf_convert import Progress
from .model_files import PARTS, Part, check_layout

_WANTED: Mapping[Part, tuple[str, ...]] = {  # weights without code: never pickles
    "config": ("config.json", "generation_config.json"),
    "tokenizer": ("*.json", "*.jinja"),
    "weights": ("*.safetensors", "*.json"),
}
_UNWANTED = ["*/*", "consolidated*.safetensors"]  # other formats' folders, the same weights under other names
_TIMEOUT_S = 10.0  # to learn about a file

ProgressBar: TypeAlias = Any
"""The class that huggingface_hub drives as it would tqdm."""


def fetch(
    repository: str,
    revision: str | None = None,
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    endpoint: str | None = None,
    parts: Collection[Part] = PARTS,
) -> Path:
    """The snapshot of `org/name` at a branch, tag or commit, as a directory; what is cached is not fetched again.

    `parts`: what is needed of it; the directory may hold more.

    `cache_dir` None is the hub library's own cache (HF_HOME). Without network, or with HF_HUB_OFFLINE=1, the cached
    snapshot is used if it is whole. `endpoint` None: HF_ENDPOINT or huggingface.co.
    Raises ConfigError with the remedy: not found, gated, no network, not in the safetensors format.
    """
    from huggingface_hub import errors, snapshot_download  # slow to import; only hub models need it

    name = f"{repository}@{revision}" if revision else repository
    try:
        path = snapshot_download(
            repository,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=sorted({pattern for part in {"config", *parts} for pattern in _WANTED[part]}),
            ignore_patterns=_UNWANTED,
            etag_timeout=_TIMEOUT_S,
            endpoint=endpoint,
            max_workers=4,
            tqdm_class=_progress_bar(progress),
        )
    except errors.HFValidationError as error:
        raise _cannot(name, "is not a hub id of the form org/name[@revision]") from error
    except errors.GatedRepoError as error:
        raise _cannot(name, "is gated: accept its terms on the hub, then set HF_TOKEN to your access token") from error
    except errors.RepositoryNotFoundError as error:
        raise _cannot(name, "was not found on the hub (if it is private, set HF_TOKEN to your token)") from error
    except errors.RevisionNotFoundError as error:
        raise _cannot(name, "is a model without this revision (branch, tag or commit)") from error
    except errors.LocalEntryNotFoundError as error:
        how = "unset HF_HUB_OFFLINE" if _offline() else "check the network (HF_ENDPOINT, HTTPS_PROXY)"
        raise _cannot(name, f"is not in the cache and the hub cannot be reached: {how}") from error
    except Exception as error:  # HTTP errors of several libraries, a full disk
        raise _cannot(name, f"could not be fetched ({type(error).__name__}: {str(error)[:300]})") from error
    return check_layout(Path(path), parts)


def snapshots(cache_dir: Path | None = None) -> list[tuple[str, Path]]:
    """The cached models that can be served, as (`org/name` or `org/name@commit`, directory), by name."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir(cache_dir).repos
    except CacheNotFound:
        return []
    found: list[tuple[str, Path]] = []
    for repository in repositories:
        for revision in repository.revisions if repository.repo_type == "model" else ():
            name = repository.repo_id
            try:
                path = check_layout(Path(revision.snapshot_path))
            except ConfigError:  # another program's, or half fetched
                continue
            found.append((name if "main" in revision.refs else f"{name}@{revision.commit_hash}", path))
    return sorted(found)


def _cannot(name: str, why: str) -> ConfigError:
    return ConfigError(f"model {name!r} {why}", field="model")


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _progress_bar(progress: Progress | None) -> type[ProgressBar]:
    """A tqdm class that draws nothing and reports the bytes of all bars that count bytes."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # what huggingface_hub itself uses

    lock = threading.Lock()
    seen = [0, 0]

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self.bytes_done = int(kwargs.get("initial") or 0)
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})
            self.total = kwargs.get("total")

        def update(self, n: float | None = 1) -> bool | None:
            with lock:
                self.bytes_done += int(n or 0)
                if self.counts_bytes and progress is not None:
                    seen[0] = max(seen[0], self.bytes_done)
                    seen[1] = max(seen[1], int(self.total or 0), seen[0])
                    progress("download", seen[0], seen[1])
            return None

    return Bar
