"""On the path of a stack's processes: their transport between workers does damage. Imported by Python at its start."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

TARGET = "twostroke.services.handover.kv_pool"


class Saboteur(MetaPathFinder):
    """Waits for the module that opens pools, and exchanges its transport."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """That module's own spec, with a loader that does more."""
        if fullname != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_exchange(module: ModuleType) -> None:
            load(module)
            exchange(module)

        spec.loader.exec_module = load_and_exchange  # type: ignore[method-assign]
        return spec


def exchange(module: ModuleType) -> None:
    """All transports that this process makes share what befalls them."""
    from tests.kvtransfer.faulty_transport import DAMAGE, LATE, Faults, FaultyTransport

    share = float(os.environ["DAMAGED_SHARE"])
    faults = Faults((*DAMAGE, LATE), share=share, again=True, seed=int(os.environ["DAMAGE_SEED"]))
    real = module.ShmTransport
    module.ShmTransport = lambda *arguments: FaultyTransport(real(*arguments), faults)  # type: ignore[attr-defined]


sys.meta_path.insert(0, Saboteur())
