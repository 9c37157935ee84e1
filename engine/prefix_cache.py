"""Finding pages by their content: a chain of hashes, and which pages are on their way into it."""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from ..errors import TwostrokeError
from .cache_changes import LIMIT, CacheChanges, Changes
from .request import SequenceKey

DIGEST_BYTES = 16


def cache_root(fingerprint: str, kv_dtype: str, page_size: int) -> bytes:
    """Names a model and a KV format: pages of another one must never be found."""
    return f"{fingerprint}/{kv_dtype}/{page_size}".encode()


def root_digest(cache_root: bytes, salt: bytes) -> bytes:
    """The start of a chain: `cache_root` names the model and the KV format, `salt` a tenant (empty: shared by all)."""
    length = len(cache_root).to_bytes(8, "little")
    return blake2b(length + cache_root + salt, digest_size=DIGEST_BYTES).digest()


def extend_chain(chain: list[bytes], root: bytes, tokens: list[int], page_size: int) -> None:
    """Appends the digests of all full pages of `tokens` that `chain` lacks.

    A digest covers its page's tokens and, by its parent, all before them: equal digests mean equal KV.
    """
    for page in range(len(chain), len(tokens) // page_size):
        parent = chain[-1] if chain else root
        content = array("I", tokens[page * page_size : (page + 1) * page_size]).tobytes()
        chain.append(blake2b(parent + content, digest_size=DIGEST_BYTES).digest())


class PageContent(NamedTuple):
    """What a digest stands for, for those who want to know. `tokens`: the page's, 4 bytes each, little-endian."""

    root: bytes  # of its chain
    parent: bytes  # digest of the page before it, or `root`
    tokens: bytes


def page_contents(
    root: bytes, chain: Sequence[bytes], tokens: Sequence[int], pages: range, page_size: int
) -> list[PageContent]:
    """Of full pages of a sequence, by index. In one go: a prompt that arrives whole has hundreds."""
    packed = array("I", tokens[pages.start * page_size : pages.stop * page_size])
    if sys.byteorder == "big":
        packed.byteswap()
    content, size = packed.tobytes(), packed.itemsize * page_size
    parents = [root, *chain[: pages.stop]] if pages.start == 0 else chain[pages.start - 1 : pages.stop]
    return [
        PageContent(root, parent, content[place : place + size])
        for parent, place in zip(parents, range(0, len(content), size), strict=False)
    ]


class PrefixCache:
    """The map between digests and pages. Who owns the pages is the block pool's business."""

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._contents: dict[bytes, PageContent] = {}
        self._changes = CacheChanges()

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, chain: Sequence[bytes]) -> list[int]:
        """The pages of the longest known beginning of `chain`."""
        found: list[int] = []
        for digest in chain:
            page = self._pages.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def add(self, page: int, digest: bytes, content: PageContent | None = None) -> bool:
        """Makes `page` findable; False, and no change, when another page of that content is known already."""
        if self._digests.get(page, digest) != digest:
            raise TwostrokeError(f"page {page} is registered with other content")
        if self._pages.setdefault(digest, page) != page:
            return False
        if page not in self._digests:
            self._digests[page] = digest
            self._changes.stored(digest)
            if content is not None:
                self._contents[digest] = content
        return True

    def digest_of(self, page: int) -> bytes | None:
        """The digest that `page` is found by, if any."""
        return self._digests.get(page)

    def content_of(self, digest: bytes) -> PageContent | None:
        """What was said of a page that can be found."""
        return self._contents.get(digest)

    def forget(self, page: int) -> None:
        """`page` gets other content: it is not to be found any more."""
        digest = self._digests.pop(page)
        del self._pages[digest]
        self._contents.pop(digest, None)
        self._changes.evicted(digest)

    def take_changes(self) -> Changes:
        """What it gained and lost since the last call."""
        return self._changes.take() or self.everything()

    def everything(self) -> Changes:
        """All that it has, for whoever knows nothing yet; of very many pages the newest ones."""
        return Changes(True, list(self._pages)[-LIMIT:], [])

    def entries(self) -> dict[bytes, int]:
        """A copy of the map, for checks."""
        return dict(self._pages)


class PendingPages:
    """Digests that a live sequence will fill soon. Sequences that want the same content wait for it.

    `group` keeps apart who may wait for whom: None for pages computed here, else the incarnation of the worker that
    writes them. The first to announce a digest owns the entry; a second one announces nothing, so that an entry's owner
    is always known and O(1) to look up.
    """

    def __init__(self) -> None:
        self._owners: dict[tuple[int | None, bytes], SequenceKey] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def announce(self, group: int | None, digests: Sequence[bytes], owner: SequenceKey) -> None:
        """`owner` is going to fill these."""
        for digest in digests:
            self._owners.setdefault((group, digest), owner)

    def withdraw(self, group: int | None, digests: Sequence[bytes], owner: SequenceKey) -> None:
        """`owner` has filled these, or never will. Entries of others stay."""
        for digest in digests:
            if self._owners.get((group, digest)) == owner:
                del self._owners[group, digest]

    def __contains__(self, entry: tuple[int | None, bytes]) -> bool:
        return entry in self._owners

    def entries(self) -> dict[tuple[int | None, bytes], SequenceKey]:
        """A copy of the table, for checks."""
        return dict(self._owners)
