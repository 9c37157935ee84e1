"""A runner without a model that really uses the pages: a page mix-up of any kind changes its tokens."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from twostroke.engine.batch import UNSEEN, Computed, Launched, LayerHook, NextTokens, Row
from twostroke.engine.request import NO_TOKEN, SequenceKey, Token

NEVER_WRITTEN = -1


def next_token(context: Sequence[int], vocab_size: int, sample: int = 0) -> int:
    """The "model": a hash of all tokens so far; each sample has its own noise."""
    content = b"".join(token.to_bytes(8, "little", signed=True) for token in context)
    content += sample.to_bytes(4, "little") if sample else b""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little") % vocab_size


def drawn(context: Sequence[int], vocab_size: int, sample: int, matching: NextTokens | None) -> int:
    """`next_token`, among those that are allowed."""
    token = next_token(context, vocab_size, sample)
    if matching is None:
        return token
    ids = allowed_ids(matching.allowed())
    return ids[token % len(ids)] if ids else NO_TOKEN


def allowed_ids(words: npt.NDArray[np.int32]) -> list[int]:
    """The tokens of a mask."""
    bits: list[int] = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return bits


class Fixed:
    """A mask as it was when it was asked for. Implements `NextTokens`."""

    def __init__(self, words: npt.NDArray[np.int32]) -> None:
        self._words = words.copy()

    def allowed(self) -> npt.NDArray[np.int32]:
        return self._words


def expected_tokens(
    prompt: Sequence[int],
    count: int,
    vocab_size: int,
    *,
    stop: frozenset[int] = frozenset(),
    context: int = 1 << 30,
    sample: int = 0,
) -> list[int]:
    """What a sequence must answer: `count` tokens, fewer if one of `stop` comes or the context is full."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + count, context):
        tokens.append(next_token(tokens, vocab_size, sample))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class FakeRunner:
    """Stores token ids in place of KV: memory[page][slot]."""

    overlaps = False

    def __init__(self, pages: int, page_size: int, vocab_size: int, layers: int = 2) -> None:
        self.memory = [[NEVER_WRITTEN] * page_size for _ in range(pages)]
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.layers = layers
        self.steps: list[list[tuple[SequenceKey, int, int]]] = []  # of each step: key, start, tokens
        self.copies: list[tuple[int, int]] = []  # pages, from and to
        self.fail_with: Exception | None = None
        self.fail_copies_with: Exception | None = None

    def launch(self, rows: list[Row], hook: LayerHook | None) -> Launched:
        return Computed(self.run(rows, hook))

    def run(self, rows: list[Row], hook: LayerHook | None) -> list[Token]:
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        self.steps.append([(row.key, row.start, len(row.token_ids)) for row in rows])
        slots = [(page, slot) for row in rows for page, slot in self._write(row)]
        assert len(set(slots)) == len(slots), "two rows write one slot"
        assert len({row.key for row in rows}) == len(rows), "two rows of one sequence"
        progress = [row.progress for row in rows if row.progress is not None]
        assert (hook is None) or progress, "a hook without PREFILL rows"
        for layer in range(self.layers if hook else 0):
            assert hook is not None
            hook(layer, progress)
        return [
            Token(drawn(self.read(row.pages, row.start + len(row.token_ids)), self.vocab_size, sample, row.matching))
            for row in rows
            if row.sample
            for sample in range(row.key.sample, row.key.sample + row.samples)
        ]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if self.fail_copies_with is not None:
            error, self.fail_copies_with = self.fail_copies_with, None
            raise error
        assert not set(sources) & set(targets), "a page is copied onto one that is copied"
        assert len(set(targets)) == len(targets), "two copies into one page"
        for source, target in zip(sources, targets, strict=True):
            assert target != 0, "a copy into the sink"
            self.memory[target] = list(self.memory[source])
            self.copies.append((source, target))

    def _write(self, row: Row) -> list[tuple[int, int]]:
        assert row.token_ids, "an empty row"
        assert row.start + len(row.token_ids) <= len(row.pages) * self.page_size, "the block table is too short"
        written = []
        for position, token in enumerate(row.token_ids, row.start):
            page, slot = row.pages[position // self.page_size], position % self.page_size
            assert page != 0, "the sink in a block table"
            self.memory[page][slot] = token
            written.append((page, slot))
        return written

    def read(self, pages: Sequence[int], length: int) -> list[int]:
        """The first `length` tokens of a block table."""
        return [self.memory[pages[at // self.page_size]][at % self.page_size] for at in range(length)]

    def fill(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """What a writer elsewhere does: `tokens` from pages[0]'s first slot on."""
        for at, token in enumerate(tokens):
            self.memory[pages[at // self.page_size]][at % self.page_size] = token

    @property
    def tokens_run(self) -> int:
        """Tokens computed in all steps."""
        return sum(tokens for step in self.steps for _, _, tokens in step)


class LazyRunner(FakeRunner):
    """Computes a launched step as late as it may: when its tokens are asked for, or a copy is behind it."""

    overlaps = True

    def __init__(self, pages: int, page_size: int, vocab_size: int, layers: int = 2) -> None:
        super().__init__(pages, page_size, vocab_size, layers)
        self.on_the_way: deque[LazyStep] = deque()
        self.most_on_the_way = 0
        self.last: dict[SequenceKey, int] = {}  # the token drawn last of each sequence

    def launch(self, rows: list[Row], hook: LayerHook | None) -> Launched:
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        # The lists are the engine's: it changes them while the step is on its way.
        own = [replace(row, token_ids=list(row.token_ids), pages=list(row.pages)) for row in rows]
        step = LazyStep(self, own, hook)
        self.on_the_way.append(step)
        self.most_on_the_way = max(self.most_on_the_way, len(self.on_the_way))
        return step

    def compute(self, until: "LazyStep | None" = None) -> None:
        """All steps on their way, in their order, up to this one."""
        while self.on_the_way and (until is None or until.result is None):
            if until is None and not self.on_the_way[0].drawn:
                return  # its forward pass has no part in what is copied
            step = self.on_the_way.popleft()
            assert step.drawn, "constrained rows are computed before they were drawn for"
            for row in step.rows:
                if row.token_ids == [UNSEEN]:
                    row.token_ids = [self.last[row.key]]
            step.result = self.run(step.rows, step.hook)
            drawn = iter(step.result)
            for row in step.rows:
                for sample in range(row.samples if row.sample else 0):
                    self.last[row.key._replace(sample=row.key.sample + sample)] = next(drawn).token_id

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.compute()
        super().copy_pages(sources, targets)


class LazyStep:
    """A step of a `LazyRunner` on its way."""

    def __init__(self, runner: LazyRunner, rows: list[Row], hook: LayerHook | None) -> None:
        self.rows = rows
        self.hook = hook
        self.result: list[Token] | None = None
        self.drawn = not any(row.matching is not None for row in rows)
        self._runner = runner

    def draw(self) -> None:
        assert not self.drawn
        self.drawn = True
        for row in self.rows:
            if row.matching is not None:
                row.matching = Fixed(row.matching.allowed())

    def tokens(self) -> list[Token]:
        self._runner.compute(self)
        assert self.result is not None
        return self.result
