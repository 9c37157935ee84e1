"""What the two sides of a hand-over say to each other, and what their machines tell the caller to do.

Plain data. `Key` is opaque here: whatever names a sequence for the caller. Peers are named by their incarnations.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

Key: TypeAlias = Hashable


@dataclass(frozen=True, slots=True)
class Ticket:
    """D to P: write this sequence's KV into these pages of mine."""

    ticket: int  # rises by one for each pair of incarnations, from 1
    key: Key
    pool: int
    pages: tuple[int, ...]
    first_position: int  # of pages[0]'s first token
    valid_s: float


@dataclass(frozen=True, slots=True)
class Revoke:
    """D to P: stop; answer `Drained` once no write can come any more."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """D to P: digests matched."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Resend:
    """D to P: digests of these ordinals of the page list did not match in that round."""

    ticket: int
    ordinals: tuple[int, ...]
    round: int = 0  # of the `Complete` that it answers


@dataclass(frozen=True, slots=True)
class Progress:
    """P to D: (ticket, leading layers, leading pages) that are written."""

    entries: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Token 0 of a sample, as P answered it to the gateway."""

    sample: int
    token_id: int
    finish: int  # 0 goes on
    logprobs: tuple[tuple[int, float], ...] = ()
    queue: float = 0.0  # seconds until its first chunk
    prefill: float = 0.0  # seconds from there to this token
    cached_tokens: int = 0  # of the prompt, that P did not have to compute


@dataclass(frozen=True, slots=True)
class Complete:
    """P to D: all is written, as P's host saw. Repeated until answered."""

    ticket: int
    first_tokens: tuple[FirstToken, ...]
    digests: bytes  # of each page, folded over the layers (`fold_layers`); empty when every first token has a finish
    round: int = 0  # counts the resends before it: a late copy of an older round must not end the hold on the pages


@dataclass(frozen=True, slots=True)
class Drained:
    """P to D: no write under this ticket can come any more."""

    ticket: int
    reason: str = ""


FromReader: TypeAlias = Ticket | Revoke | Accepted | Resend
FromWriter: TypeAlias = Progress | Complete | Drained
Message: TypeAlias = FromReader | FromWriter


@dataclass(frozen=True, slots=True)
class Send:
    """Instruction: send to this peer if its link is up, else drop it (the machine repeats what matters)."""

    peer: int
    message: Message


@dataclass(frozen=True, slots=True)
class Copy:
    """Instruction to P: copy pages of one layer into the reader's pool, digest the source, then call `copied`."""

    copy: int  # unique in the process
    reader: int
    ticket: int
    layer: int
    ordinal: int  # of src[0] in the ticket's page list
    src: tuple[int, ...]
    dst: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClosePool:
    """Instruction to P: unmap this dead reader's pool; no copy into it is under way."""

    reader: int


@dataclass(frozen=True, slots=True)
class Ticketed:
    """Instruction to P: the engine may run this sequence ahead of unticketed ones."""

    key: Key


@dataclass(frozen=True, slots=True)
class Release:
    """Instruction to P: nobody needs this sequence's source pages any more."""

    key: Key


@dataclass(frozen=True, slots=True)
class Verify:
    """Instruction to D: digest these pages of these layers of one's own pool, then call `digested`."""

    writer: int
    ticket: int
    first_layer: int
    layers: int
    ordinal: int  # of pages[0] in the ticket's page list
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrived:
    """Instruction to D: the sequence's KV is whole; run it."""

    key: Key
    first_tokens: tuple[FirstToken, ...]
    verified: bool = True  # False when every first token has a finish: the pages are unchecked, never to be cached


@dataclass(frozen=True, slots=True)
class Lost:
    """Instruction to D: the sequence's KV will not come; its pages stay held until `Unhold`."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Unhold:
    """Instruction to D: the writer can no longer touch this ticket's pages."""

    writer: int
    ticket: int


Instruction: TypeAlias = Send | Copy | ClosePool | Ticketed | Release | Verify | Arrived | Lost | Unhold
