"""The queue that a prefill worker's times to the first token are held against."""

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def pd(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("gpu_pd")


def test_each_waits_for_those_before_it(pd: ModuleType) -> None:
    assert pd.fifo([0.0, 1.0, 2.0, 9.0], [2.0, 1.0, 1.0, 0.5]) == [2.0, 2.0, 2.0, 0.5]
    assert pd.fifo([2.0, 0.0], [1.0, 3.0]) == [1.0, 3.0]  # by arrival


def test_a_prompt_launched_behind_another_is_served_once_that_one_has_ended(pd: ModuleType) -> None:
    assert pd.served([12.0, 13.5, 20.0], [2.0, 3.0, 1.5]) == [2.0, 1.5, 1.5]
    assert pd.served([13.5, 12.0], [3.0, 2.0]) == [2.0, 1.5]  # by end
