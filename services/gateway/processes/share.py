"""What one of several gateway processes is told by the one that started it."""

import os
from dataclasses import dataclass
from pathlib import Path

from ....errors import ConfigError
from .memory import MAX_PROCESSES

FIGURES = "figures"  # folder of counters, a file a process; those of processes that died are counted too
FIGURES_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads it when it is imported


@dataclass(frozen=True, slots=True)
class Share:
    """`index` of `count`; `descriptor`: of the memory that they share; `folder`: of their sockets and figures."""

    index: int
    count: int
    descriptor: int
    folder: Path

    @classmethod
    def read(cls, text: str) -> "Share":
        """Of a command line. ConfigError where it is none."""
        try:
            index, count, descriptor, folder = text.split(":", 3)
            share = cls(int(index), int(count), int(descriptor), Path(folder))
            os.fstat(share.descriptor)
        except (ValueError, OSError) as error:
            raise ConfigError(f"share: got {text!r}, takes what `--processes` gives", field="share") from error
        if not 0 <= share.index < share.count <= MAX_PROCESSES:
            raise ConfigError(f"share: got {text!r}, takes an index below {MAX_PROCESSES}", field="share")
        return share

    def text(self) -> str:
        """For a command line."""
        return f"{self.index}:{self.count}:{self.descriptor}:{self.folder}"

    def socket(self, index: int) -> str:
        """gRPC's address of a process, for the others."""
        return f"unix:{self.folder / str(index)}"

    @property
    def figures(self) -> Path:
        """Where counters are."""
        return self.folder / FIGURES
