"""The queue that a prefill worker's times to the first token are held against."""

import importlib

import pytest


@pytest.fixture
def module():  # type: ignore[no-untyped-def]
    return importlib.import_module("gpu_pd")


def test_each_waits_for_those_before_it(module) -> None:  # type: ignore[no-untyped-def]
    assert module.fifo([0.0, 1.0, 2.0, 9.0], [2.0, 1.0, 1.0, 0.5]) == [2.0, 2.0, 2.0, 0.5]
    assert module.fifo([2.0, 0.0], [1.0, 3.0]) == [1.0, 4.0]  # by arrival


def test_a_prompt_launched_behind_another_is_served_once_that_one_has_ended(module) -> None:  # type: ignore[no-untyped-def]
    assert module.served([12.0, 13.5, 20.0], [2.0, 3.0, 1.5]) == [2.0, 1.5, 1.5]
    assert module.served([13.5, 12.0], [3.0, 2.0]) == [2.0, 1.5]  # by end
