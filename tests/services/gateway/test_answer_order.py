"""Interleaved answers come out one after another."""

import random

import pytest

from twostroke.services.gateway.answer_order import AnswerOrder


def test_the_first_streams_and_the_others_wait() -> None:
    order = AnswerOrder(3)
    assert list(order.push(1, "b", ended=False)) == []
    assert list(order.push(0, "a", ended=False)) == [(0, "a", False)]
    assert list(order.push(2, "c", ended=True)) == []
    assert list(order.push(1, "B", ended=False)) == []
    assert list(order.push(0, "A", ended=True)) == [(0, "A", True), (1, "bB", False)]
    assert list(order.push(1, "!", ended=True)) == [(1, "!", True), (2, "c", True)]
    assert list(order.push(1, "late", ended=True)) == list(order.push(9, "x", ended=True)) == []


@pytest.mark.parametrize("seed", range(20))
def test_any_interleaving_gives_each_text_once_and_in_order(seed: int) -> None:
    draw = random.Random(seed)
    answers = draw.randint(1, 5)
    texts = [[str(draw.randint(0, 99)) for _ in range(draw.randint(1, 6))] for _ in range(answers)]
    left = [list(text) for text in texts]
    order, out = AnswerOrder(answers), []
    while any(left):
        answer = draw.choice([index for index, text in enumerate(left) if text])
        out += order.push(answer, left[answer].pop(0), ended=not left[answer])
    assert [answer for answer, _, _ in out] == sorted(answer for answer, _, _ in out)
    for index, text in enumerate(texts):
        assert "".join(piece for answer, piece, _ in out if answer == index) == "".join(text)
    assert [answer for answer, _, whole in out if whole] == list(range(answers))
