"""On the path of a stack's processes: their transport between workers does damage. Imported by Python at its start."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

TARGETS = {
    "twostroke.services.handover.kv_pool": "ShmTransport",
    "twostroke.services.handover.gpu_pool": "CudaIpcTransport",
}


class Saboteur(MetaPathFinder):
    """Waits for the modules that open pools, and exchanges their transports."""

    def __init__(self) -> None:
        """For the life of the process."""
        self._met: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Such a module's own spec, with a loader that does more."""
        if fullname not in TARGETS or fullname in self._met:
            return None
        self._met.add(fullname)  # the next one who is asked finds it
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_exchange(module: ModuleType) -> None:
            load(module)
            exchange(module, TARGETS[fullname])

        spec.loader.exec_module = load_and_exchange  # type: ignore[method-assign]
        return spec


def exchange(module: ModuleType, name: str) -> None:
    """All such transports that this process makes share what befalls them."""
    from tests.kvtransfer.faulty_transport import DAMAGE, LATE, Faults, FaultyTransport

    share = float(os.environ["DAMAGED_SHARE"])
    faults = Faults((*DAMAGE, LATE), share=share, again=True, seed=int(os.environ["DAMAGE_SEED"]))
    real = getattr(module, name)
    setattr(module, name, lambda *arguments: FaultyTransport(real(*arguments), faults))


sys.meta_path.insert(0, Saboteur())
