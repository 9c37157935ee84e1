"""What the protocol's test world is made of: requests, workers, links."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from twostroke.kvtransfer.messages import Copy, FirstToken, Message, Verify
from twostroke.kvtransfer.reader import Reader
from twostroke.kvtransfer.writer import Writer

LAYERS, PAGE, D_PAGES, P_PAGES, VALID_S = 2, 4, 12, 14, 6.0
Pick = Callable[[int], int]  # n -> one of 0 .. n - 1
Value = tuple[int, int, int, int]  # key, layer, page of the prompt, tokens in it


class Violation(AssertionError):
    """Something that must never happen did."""


def need(condition: object, message: str) -> None:
    if not condition:
        raise Violation(message)


def digest(value: Value | None, ticket: int, layer: int, ordinal: int) -> bytes:
    return (hash((value or (0, 0, 0, 0), ticket, layer, ordinal)) & (1 << 64) - 1).to_bytes(8, "little")


@dataclass
class Job:
    """A request, as both workers know it."""

    key: int
    decode: int
    prefill: int
    total: int
    first_page: int
    finish: int
    on_decode: str = "new"  # waiting, arrived, lost, gone
    on_prefill: str = "new"  # running, gone, released
    answered: bool = False  # token 0 went to the gateway

    def first(self) -> tuple[FirstToken, ...]:
        return (FirstToken(0, self.key * 7, self.finish),)

    def pages(self) -> int:
        return -(-self.total // PAGE)

    def value(self, layer: int, index: int, ready: int) -> Value:
        return (self.key, layer, index, max(0, min(PAGE, ready - index * PAGE)))


@dataclass
class Worker:
    incarnation: int
    pages: int
    late: bool = False  # copies and verifications finish later
    alive: bool = True
    frozen: bool = False
    memory: dict[tuple[int, int], Value] = field(default_factory=dict)  # (layer, page)
    owned: dict[int, list[int]] = field(default_factory=dict)  # key -> pages
    told_dead: set[int] = field(default_factory=set)

    def held(self) -> Iterable[int]:
        return ()

    def free(self) -> list[int]:
        used = [page for pages in self.owned.values() for page in pages]
        need(len(used) == len(set(used)), "a page is doubly owned")
        return sorted(set(range(1, self.pages)) - set(used) - set(self.held()))


@dataclass
class Decode(Worker):
    reader: Reader = field(default=None)  # type: ignore[assignment]
    holds: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)  # (writer, ticket) -> pages
    keys: dict[tuple[int, int], int] = field(default_factory=dict)
    verifies: list[Verify] = field(default_factory=list)

    def held(self) -> Iterable[int]:
        pages = [page for hold in self.holds.values() for page in hold]
        need(len(pages) == len(set(pages)), "a page is in two tickets")
        return pages


@dataclass
class Flight:
    copy: Copy
    key: int
    landed: bool = False
    digests: bytes = b""


@dataclass
class Prefill(Worker):
    writer: Writer = field(default=None)  # type: ignore[assignment]
    ready: dict[int, int] = field(default_factory=dict)  # key -> tokens computed
    ticketed: set[int] = field(default_factory=set)
    flights: dict[int, Flight] = field(default_factory=dict)
    mapped: set[int] = field(default_factory=set)


@dataclass
class Link:
    up: bool = False
    to_decode: deque[Message | str] = field(default_factory=deque)
    to_prefill: deque[Message | str] = field(default_factory=deque)
