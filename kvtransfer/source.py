"""A prompt on the prefill side: which of its pages the engine has written so far."""

from collections.abc import Sequence

from .messages import FirstToken, Key
from .push import Push


class Source:
    """One expected sequence, from its submission until nobody needs its pages."""

    def __init__(self, key: Key, reader: int, layers: int, page_size: int) -> None:
        """`reader`: the incarnation that its KV is for."""
        self.key = key
        self.reader = reader
        self.push: Push | None = None  # the ticket that it serves
        self.abandoned = False  # its ticket is closed or its reader dead; still computing token 0
        self.first: tuple[FirstToken, ...] | None = None  # once the prompt is done
        self.total: int | None = None  # tokens; known from the first step
        self.pages: tuple[int, ...] = ()  # the prompt's; empty until announced, and again after a restart
        self._page_size = page_size
        self._ready = [0] * layers  # tokens written, by layer

    def advance(self, layers: range, pages: Sequence[int], ready: int, total: int) -> bool:
        """Notes progress in these layers; False when it contradicts what was ready: it starts anew (a recompute)."""
        needed = -(-total // self._page_size)
        if not 0 <= ready <= total or len(pages) < needed:
            raise ValueError(f"{ready} of {total} tokens ready on {len(pages)} pages")
        now = tuple(pages[:needed])
        same = not self.pages or (now == self.pages and total == self.total and ready >= self._ready[layers.start])
        if not same:
            self.restart()
        self.total, self.pages = total, now
        self._ready[layers.start : layers.stop] = [ready] * len(layers)
        return same

    def restart(self) -> None:
        """Its pages were taken from it: nothing is ready. A token 0 already answered is kept."""
        self._ready = [0] * len(self._ready)
        self.pages = ()

    def finish(self, first: tuple[FirstToken, ...]) -> None:
        """Token 0 is known, hence all is written."""
        self.first = first
        if self.pages and self.total is not None:
            self._ready = [self.total] * len(self._ready)

    def whole_pages(self, layer: int) -> int:
        """Leading pages of the prompt that will not change in this layer: full ones, at the end the last one too."""
        ready = self._ready[layer]
        return len(self.pages) if ready == self.total else ready // self._page_size

    def finished(self) -> bool:
        """Whether token 0 ended every sample, so that nobody will read the KV."""
        return bool(self.first) and all(token.finish for token in self.first or ())

    def mismatch(self, first_position: int, pages: int) -> str:
        """Why a ticket for so many pages from there does not fit this prompt; empty when it does or none is known."""
        if self.total is None:
            return "the prompt is done, but none of its pages was announced" if self.first is not None else ""
        wanted = -(-self.total // self._page_size) - first_position // self._page_size
        if pages == wanted:
            return ""
        return f"the ticket has {pages} pages from position {first_position} of {self.total}, not {wanted}"
