"""The collector of a process that serves."""

import gc
import weakref

from twostroke.services.garbage import NEW_OBJECTS, settle


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.next = self


def test_what_is_there_stays_and_new_rings_are_still_found() -> None:
    before = gc.get_threshold()
    try:
        settle()
        assert gc.get_freeze_count() > 0
        gone = weakref.ref(Ring())
        kept = [[] for _ in range(2 * NEW_OBJECTS)]  # type: ignore[var-annotated]
        assert gone() is None
        del kept
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
