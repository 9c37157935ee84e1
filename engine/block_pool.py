"""Who owns which page of the KV pool. Knows ids only; the memory is the model runner's."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

from ..errors import ConfigError, TwostrokeError
from .prefix_cache import PageContent, PrefixCache

SINK = 0  # padding rows write here; never allocated


class BlockPool:
    """Reference-counted pages.

    A page is in one state: free; owned (by sequences, or held by tickets: each is a reference); cached (no
    reference, but found by its content until it is needed for something else: evicted least recently used first, or
    with an old neighbour); or retiring (given up, but a launched step may still write it: free once the host has seen
    that step completed). A ticket's reference outlives the sequence that it was for: a page that only tickets own is
    quarantined, because a writer elsewhere may still write into it. The pool never breaks its own rules: a call that
    would raises TwostrokeError.
    """

    def __init__(self, pages: int) -> None:
        """`pages`: of the whole pool, the sink (page 0) counted in."""
        if pages < 2:
            raise ConfigError(f"a pool of {pages} pages has none to use", field="kv_memory")
        self.pages = pages
        self.prefix = PrefixCache()
        self._references = [0] * pages
        self._free = list(range(pages - 1, SINK, -1))  # a stack
        self._evictable: OrderedDict[int, int] = OrderedDict()  # least recently used first; when it was, as a number
        self._uses = 0  # that number, so far
        self._holds: dict[Hashable, tuple[int, ...]] = {}
        self._held: dict[int, int] = {}  # page: how many holds
        self._retiring: deque[tuple[int, int]] = deque()  # page, and the last step launched when it was given up
        self._launched = 0  # steps
        self._completed = 0

    @property
    def usable(self) -> int:
        """Pages that can be allocated at all."""
        return self.pages - 1

    @property
    def free_pages(self) -> int:
        """Pages that `allocate` could give out now: free and cached ones."""
        return len(self._free) + len(self._evictable)

    @property
    def cached(self) -> int:
        """Pages that nobody owns but that can be found by their content."""
        return len(self._evictable)

    @property
    def retiring(self) -> int:
        """Pages that will be free when the steps on their way are completed."""
        return len(self._retiring)

    @property
    def held_pages(self) -> int:
        """Pages under at least one ticket, quarantined ones counted in."""
        return len(self._held)

    @property
    def quarantined(self) -> int:
        """Held pages without another owner."""
        return sum(self._references[page] == holds for page, holds in self._held.items())

    def references(self, page: int) -> int:
        """Owners of `page`."""
        return self._references[page]

    def is_evictable(self, page: int) -> bool:
        """Whether `page` is cached and unowned."""
        return page in self._evictable

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages with undefined content, one reference each; evicts cached pages where it must.

        In rising order: neighbours in a block table that are neighbours in the pool too are one piece to a transfer.
        """
        if count > self.free_pages:
            raise TwostrokeError(f"{count} pages wanted, {self.free_pages} free")
        pages = [self._free.pop() for _ in range(min(count, len(self._free)))]
        while len(pages) < count:
            pages += self._evict(count - len(pages))
        for page in pages:
            self._references[page] = 1
        return sorted(pages)

    def _evict(self, most: int) -> list[int]:
        """The cached page that was used least recently, and neighbours below it that are in the oldest quarter of all
        uses: a pool full of cached pages would fall apart into single ones. Below, as a chain's last page is its
        highest.
        """
        page, use = self._evictable.popitem(last=False)
        evicted, old = [page], (3 * use + self._uses) // 4
        while len(evicted) < most and self._evictable.get(page - 1, old + 1) <= old:
            page -= 1
            del self._evictable[page]
            evicted.append(page)
        for page in evicted:
            self.prefix.forget(page)
        return evicted

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to each of `pages`, which are owned or cached."""
        for page in pages:
            if self._references[page] == 0:
                if page not in self._evictable:
                    raise TwostrokeError(f"page {page} is free: it cannot be shared")
                del self._evictable[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Gives one reference to each of `pages` back: the only way on which pages become free.

        The last pages of a chain are released first, so that they are evicted before those that they depend on.
        """
        for page in reversed(pages):
            if self._references[page] == 0:
                raise TwostrokeError(f"page {page} is released but nobody owns it")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._retire(page)

    def _retire(self, page: int) -> None:
        if self.prefix.digest_of(page) is not None:
            self._uses += 1
            self._evictable[page] = self._uses  # whole: whoever is on its way reads it at most
        elif self._completed < self._launched:
            self._retiring.append((page, self._launched))
        else:
            self._free.append(page)

    def launched(self) -> None:
        """A step is on its way that may write any page owned now. Steps complete in the order of their launch."""
        self._launched += 1

    def completed(self) -> None:
        """The host has seen the oldest step on its way completed."""
        if self._completed == self._launched:
            raise TwostrokeError("no step is on its way")
        self._completed += 1
        while self._retiring and self._retiring[0][1] <= self._completed:
            self._free.append(self._retiring.popleft()[0])

    def register(self, page: int, digest: bytes, content: PageContent | None = None) -> bool:
        """`page`, which is owned, is written for certain. False: that content is known in another page."""
        if self._references[page] == 0:
            raise TwostrokeError(f"page {page} is registered but nobody owns it")
        return self.prefix.add(page, digest, content)

    def hold(self, name: Hashable, pages: Sequence[int]) -> None:
        """A ticket's references to `pages`, which must be owned; they stay until `unhold`, whoever else lets go."""
        if name in self._holds:
            raise TwostrokeError(f"hold {name!r} exists already")
        for page in pages:
            if self._references[page] == 0:
                raise TwostrokeError(f"page {page} is held but nobody owns it")
        for page in pages:
            self._references[page] += 1
            self._held[page] = self._held.get(page, 0) + 1
        self._holds[name] = tuple(pages)

    def unhold(self, name: Hashable) -> bool:
        """Nobody can write under this ticket any more. False when there is no such hold."""
        pages = self._holds.pop(name, None)
        if pages is None:
            return False
        for page in pages:
            self._held[page] -= 1
            if self._held[page] == 0:
                del self._held[page]
        self.release(pages)
        return True

    def holds(self) -> dict[Hashable, tuple[int, ...]]:
        """A copy of all holds, for checks."""
        return dict(self._holds)

    def idle_pages(self) -> tuple[list[int], list[int]]:
        """Free and retiring pages, and the cached ones, the next to be evicted first; for checks."""
        return [*self._free, *(page for page, _ in self._retiring)], list(self._evictable)
