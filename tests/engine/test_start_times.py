import itertools

import pytest

from twostroke.engine.start_times import StartTimes


def test_parts_add_up_in_their_order():
    times = StartTimes(clock=map(float, itertools.chain([0, 2, 10, 15, 20, 21])).__next__)
    for name in ("weights", "graphs", "weights"):
        with times.part(name):
            pass
    assert times.to_dict() == {"weights": 3.0, "graphs": 5.0}
    assert times.total == 8.0
    assert str(times) == "8.0 s: weights 3.0, graphs 5.0"


def test_what_fails_counts_too():
    times = StartTimes(clock=iter([1.0, 1.5]).__next__)
    with pytest.raises(KeyError), times.part("weights"):
        raise KeyError
    assert times.to_dict() == {"weights": 0.5}


def test_nothing_yet():
    assert str(StartTimes()) == "0.0 s"
    assert StartTimes().total == 0
