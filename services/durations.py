"""Durations as they go over the wire."""


def microseconds(seconds: float) -> int:
    """What took any time at all is at least 1, as 0 says that it did not happen."""
    return max(1, round(seconds * 1e6)) if seconds > 0 else 0
