"""How often Python looks for cycles of garbage in a process that serves."""

import gc

NEW_OBJECTS = 20_000  # by which they outnumber those that went; Python's 700 are reached at a few hundred messages


def settle() -> None:
    """Call it once all is loaded: what is there now stays, and is not looked at again (a tenth of a busy gateway's
    time, and of a worker's in a decode step). What goes round in circles later is still found, at most some megabytes
    late."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, 20, 20)
