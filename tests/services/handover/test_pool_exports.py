"""Each writer's own access to a pool."""

import pytest

from twostroke.errors import Unavailable
from twostroke.services.handover import pool_exports
from twostroke.services.handover.pool_exports import PoolExports


class Export:
    """Numbered; the order of what happens is noted."""

    def __init__(self, events: list[str]) -> None:
        self.descriptor = f"{sum(event.startswith('open') for event in events)}".encode()
        self.events = events
        events.append(f"open {self.descriptor.decode()}")

    def close(self) -> None:
        self.events.append(f"close {self.descriptor.decode()}")


def test_a_new_export_comes_after_the_end_of_the_old_one() -> None:
    events: list[str] = []
    exports = PoolExports("nixl", lambda: Export(events))
    assert exports.renew(7) == b"0"
    assert exports.renew(8) == b"1"
    assert exports.renew(7) == b"2"
    assert events == ["open 0", "open 1", "close 0", "open 2"]
    exports.revoke(8)
    exports.revoke(8)
    assert (exports.has(7), exports.has(8)) == (True, False)
    exports.close()
    assert events[4:] == ["close 1", "close 2"]
    with pytest.raises(Unavailable):
        exports.renew(7)


def test_writers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_exports, "MAX_WRITERS", 2)
    exports = PoolExports("nixl", lambda: Export([]))
    exports.renew(1)
    exports.renew(2)
    with pytest.raises(Unavailable):
        exports.renew(3)
    exports.renew(2)
    exports.revoke(1)
    exports.renew(3)


def test_access_that_cannot_be_ended_is_not_forgotten() -> None:
    class Stuck(Export):
        def close(self) -> None:
            raise RuntimeError("no")

    exports = PoolExports("nixl", lambda: Stuck([]))
    exports.renew(1)
    with pytest.raises(RuntimeError):
        exports.revoke(1)
    assert exports.has(1)
