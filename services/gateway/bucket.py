"""A limit of so many a minute: the generic cell rate algorithm in whole numbers, so that refill times are exact."""

from dataclasses import dataclass

MINUTE_NS = 60_000_000_000


@dataclass(slots=True)
class Bucket:
    """A leaky bucket as a meter, which is GCRA by another name (ITU-T I.371): what is charged fills it, it leaks
    `per_minute` a minute, and what would make it overflow does not conform. It holds what may come in one minute.

    The content survives a change of the limit.
    """

    content: int = 0  # in units of which MINUTE_NS are one: what leaks in a nanosecond is whole
    at_ns: int = 0

    def wait_ns(self, amount: int, per_minute: int, now_ns: int) -> int:
        """Nanoseconds until `amount` conforms; 0: it does now. More than the bucket holds conforms when it is empty:
        its debt is paid off afterwards."""
        self._leak(per_minute, now_ns)
        over = self.content - (per_minute - min(amount, per_minute)) * MINUTE_NS
        return -(-over // per_minute) if over > 0 else 0

    def add(self, amount: int, per_minute: int, now_ns: int) -> None:
        """Charges `amount`, whether or not it conforms, or takes it back (as far as it has not leaked) where it is
        negative."""
        self._leak(per_minute, now_ns)
        self.content = max(0, self.content + amount * MINUTE_NS)

    def empty(self, per_minute: int, now_ns: int) -> bool:
        """Whether nothing of what was charged is left."""
        self._leak(per_minute, now_ns)
        return not self.content

    def _leak(self, per_minute: int, now_ns: int) -> None:
        self.content = max(0, self.content - per_minute * max(0, now_ns - self.at_ns))
        self.at_ns = max(self.at_ns, now_ns)
