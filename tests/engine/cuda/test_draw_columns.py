"""What draws ask for, taken apart once and gathered in each step; and the places that rows keep."""

import numpy as np
import pytest
import torch

from twostroke.engine.batch import Row
from twostroke.engine.cuda.draw_columns import DRAWN, MAX_TOP, PLAIN, TOLD, DrawColumns, draws_of
from twostroke.engine.cuda.state import PADDING, DeviceState
from twostroke.engine.request import SamplingParams, SequenceKey

GREEDY = SamplingParams(temperature=0.0)
HOT = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.05, top_k=40, seed=(1 << 63) + 5, logprobs=3)


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (GREEDY, 0),
        (SamplingParams(), DRAWN),
        (SamplingParams(temperature=0.0, logprobs=0), TOLD),
        (HOT, DRAWN | TOLD),
        (SamplingParams(temperature=0.0, logprobs=MAX_TOP), TOLD),
        (SamplingParams(temperature=0.0, logprobs=MAX_TOP + 1), TOLD | PLAIN),
        (SamplingParams(typical_p=0.5), DRAWN | PLAIN),
        (SamplingParams(temperature=0.0, min_tokens=1), PLAIN),
        (SamplingParams(temperature=0.0, bad_words=((1, 2),)), PLAIN),
    ],
)
def test_kinds(params: SamplingParams, kind: int) -> None:
    columns = DrawColumns.zeros(3)
    columns.put(1, params, 0)
    assert columns.kinds == kind
    assert columns.take(np.array([1, 0], np.int32)).kinds == kind
    assert columns.take(np.array([0, 2], np.int32)).kinds == 0
    assert columns.take(np.array([], np.int32)).kinds == 0


def test_what_is_put_is_what_is_taken_to_the_bit() -> None:
    columns = DrawColumns.zeros(5)
    columns.put(3, HOT, 9)
    columns.put(1, GREEDY, 2)
    taken = columns.take(np.array([3, 1, 3], np.int32))
    assert len(taken) == 3
    assert taken.wide.flags.c_contiguous
    assert taken.narrow.flags.c_contiguous
    assert taken.wide.view(np.float64)[:2].tolist() == [[0.9, 1.0, 0.9], [0.05, 0.0, 0.05]]
    assert taken.wide[2].tolist() == [5 - (1 << 63), 0, 5 - (1 << 63)]
    assert taken.narrow.view(np.float32)[0].tolist() == [np.float32(0.7), 0.0, np.float32(0.7)]
    assert taken.narrow[1:3].tolist() == [[40, 0, 40], [9, 2, 9]]
    assert taken.tops == [3, -1, 3]


def test_a_slot_that_is_given_anew_has_nothing_of_before() -> None:
    columns = DrawColumns.zeros(2)
    columns.put(1, SamplingParams(temperature=1.5, top_k=3, logprobs=30, min_tokens=2, seed=7, typical_p=0.1), 4)
    columns.put(1, GREEDY, 0)
    fresh = DrawColumns.zeros(2)
    fresh.put(1, GREEDY, 0)
    assert (columns.wide == fresh.wide).all()
    assert (columns.narrow == fresh.narrow).all()


def test_a_step_s_own_columns_are_those_of_its_draws() -> None:
    rows = [
        Row(SequenceKey(1, 0, 4, 0), [5, 6], 10, [1], HOT, True, samples=2),
        Row(SequenceKey(1, 1, 0, 0), [5], 3, [2], GREEDY, True),
    ]
    draws = draws_of(rows)
    assert [(draw.sample, draw.position) for draw in draws] == [(4, 12), (5, 12), (0, 4)]
    columns = DrawColumns.of(draws)
    assert columns.narrow[2].tolist() == [4, 5, 0]
    assert columns.tops == [3, 3, -1]


class TestPlaces:
    def row(self, number: int, pages: list[int]) -> Row:
        return Row(SequenceKey(1, number, 0, 0), [0], 0, pages, GREEDY, True)

    def test_a_row_keeps_its_place_and_is_met_once(self) -> None:
        state, rows = DeviceState(4, 8, torch.device("cpu")), [self.row(number, [number + 1]) for number in range(3)]
        updates, fresh = list[int](), list[Row]()
        slots = state.place_all(rows, updates, fresh)
        assert fresh == rows
        assert updates == [part for slot, row in zip(slots, rows, strict=True) for part in (slot, 0, row.pages[0])]
        updates.clear()
        fresh.clear()
        rows[1].pages.append(9)
        assert state.place_all(rows[::-1], updates, fresh) == slots[::-1]
        assert updates == [slots[1], 1, 9]
        assert not fresh

    def test_another_row_of_the_same_sequence_has_the_same_slot(self) -> None:
        state, pages = DeviceState(4, 8, torch.device("cpu")), [3]
        slot = state.place(self.row(1, pages), [])
        fresh: list[Row] = []
        updates: list[int] = []
        assert state.place_all([self.row(1, pages)], updates, fresh) == [slot]
        assert len(fresh) == 1
        assert not updates

    def test_a_row_whose_slot_was_given_away_gets_another_and_is_told_anew(self) -> None:
        state = DeviceState(2, 8, torch.device("cpu"))
        kept = self.row(0, [5, 6])
        first = state.place(kept, [])
        others = [state.place(self.row(number, [1]), []) for number in range(1, 5)]
        assert kept.note.slot == PADDING
        assert others[-1] == first
        updates, fresh = list[int](), list[Row]()
        (slot,) = state.place_all([kept], updates, fresh)
        assert slot not in (PADDING, first)
        assert updates == [slot, 0, 5, slot, 1, 6]
        assert fresh == [kept]

    def test_no_step_takes_a_slot_of_its_own_rows_or_of_the_step_before(self) -> None:
        state, live = DeviceState(3, 8, torch.device("cpu")), list[Row]()
        before: set[int] = set()
        for number in range(50):
            live = [*live, self.row(number, [1])][-3:]
            slots = state.place_all(live, [], [])
            assert len(set(slots)) == len(slots)
            assert PADDING not in slots
            stayed = {row.note.slot for row in live[:-1]}
            assert slots[-1] not in before | stayed
            before = set(slots)
