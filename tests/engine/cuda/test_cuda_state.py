"""Generated histories through the state on the device: steps read pages and last tokens by slot, as they were told."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from twostroke.engine.batch import UNSEEN, Launched, LayerHook, Row
from twostroke.engine.cuda.state import PADDING, DeviceState

from .. import history
from ..fake_engine import VOCAB, FakeEngine
from ..fake_runner import LazyRunner, LazyStep


class SlotRunner(LazyRunner):
    """Knows of a sequence what a GPU knows: what was told of its slot, in the order of the steps."""

    def __init__(self, pages: int, page_size: int, rows: int) -> None:
        super().__init__(pages, page_size, VOCAB)
        self.state = DeviceState(rows, pages, torch.device("cpu"))
        self.told: dict[int, tuple[list[int], list[int]]] = {}  # by id of a step: updates, slots of its rows

    def launch(self, rows: list[Row], hook: LayerHook | None) -> Launched:
        updates: list[int] = []
        slots = [self.state.place(row, updates) for row in rows]
        assert PADDING not in slots
        assert len(set(slots)) == len(slots), "two rows in one slot"
        step = super().launch(rows, hook)
        self.told[id(step)] = updates, slots
        return step

    def compute(self, until: LazyStep | None = None) -> None:
        tables, last_tokens = self.state.tables, self.state.last_tokens
        while self.on_the_way and (until is None or until.result is None):
            step = self.on_the_way.popleft()
            updates, slots = self.told.pop(id(step))
            for slot, index, page in zip(updates[::3], updates[1::3], updates[2::3], strict=True):
                tables[slot, index] = page
            for at, (row, slot) in enumerate(zip(step.rows, slots, strict=True)):
                tokens = [int(last_tokens[slot])] if row.token_ids == [UNSEEN] else row.token_ids
                reach = -(-(row.start + len(tokens)) // self.page_size)
                step.rows[at] = replace(row, token_ids=tokens, pages=tables[slot, :reach].tolist())
            step.result = self.run(step.rows, step.hook)
            drawn = iter(step.result)
            for row, slot in zip(step.rows, slots, strict=True):
                own = [next(drawn).token_id for _ in range(row.samples if row.sample else 0)]
                if len(own) == 1:
                    last_tokens[slot] = own[0]


class SlotEngine(FakeEngine):
    """Its steps overlap, on a `SlotRunner` for as many rows as run at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "lazy": True})
        self.runner = SlotRunner(self.core.pool.pages, self.options.page_size, self.options.max_batch)
        self.core._runner = self.core._postprocessor._runner = self.runner


def hunt(monkeypatch: pytest.MonkeyPatch, walks: int) -> None:
    monkeypatch.setattr(history, "FakeEngine", SlotEngine)
    for seed in range(walks):
        history.Walk(seed).run(200)


def test_generated_histories_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    hunt(monkeypatch, 25)


@pytest.mark.slow
def test_many_generated_histories_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    hunt(monkeypatch, 300)


def test_a_sequence_that_is_told_of_once_only_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lost its pages would be taken for what it was."""
    place = DeviceState.place

    def again(self: DeviceState, row: Row, updates: list[int]) -> int:
        fresh: list[int] = []
        slot = place(self, row, fresh)
        for at in range(0, len(fresh), 3):
            if (slot, row.key, fresh[at + 1]) not in known:
                known.add((slot, row.key, fresh[at + 1]))
                updates += fresh[at : at + 3]
        return slot

    known: set[tuple[Any, ...]] = set()
    monkeypatch.setattr(DeviceState, "place", again)
    with pytest.raises(AssertionError):
        hunt(monkeypatch, 60)
