"""Several answers that come interleaved, as one text after another."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Kept:
    """An answer whose turn has not come: what there is of it."""

    texts: list[str] = field(default_factory=list)
    ended: bool = False


class AnswerOrder:
    """The first answer that is not whole yet goes out as it comes; the later ones are kept until their turn."""

    def __init__(self, answers: int) -> None:
        self._kept = [_Kept() for _ in range(answers)]
        self._turn = 0

    def push(self, answer: int, text: str, *, ended: bool) -> Iterator[tuple[int, str, bool]]:
        """(answer, its next text, whether it is whole now) of all that can go out. Unknown answers are dropped."""
        if not self._turn <= answer < len(self._kept):
            return
        kept = self._kept[answer]
        kept.texts.append(text)
        kept.ended = kept.ended or ended
        while self._turn < len(self._kept):
            kept = self._kept[self._turn]
            if kept.texts or kept.ended:
                texts, kept.texts = kept.texts, []
                yield self._turn, "".join(texts), kept.ended
            if not kept.ended:
                return
            self._turn += 1
