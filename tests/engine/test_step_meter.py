"""What steps took, told apart: prompts and decoding."""

import pytest

from twostroke.engine.step_meter import HEAD_START_S, HORIZON, StepMeter


def test_a_step_that_only_decodes_and_one_that_only_computes_a_prompt() -> None:
    meter = StepMeter()
    meter.note(10.0, 10.5, 0, 4)
    assert (meter.decode_step, meter.prompt_seconds) == (0.5, 0.0)
    meter.note(20.0, 22.0, 100, 0)
    assert (meter.decode_step, meter.prompt_seconds) == (0.5, 2.0)


def test_a_prompt_beside_decoding_costs_what_the_step_takes_longer() -> None:
    meter = StepMeter()
    meter.note(0.0, 0.5, 0, 4)
    meter.note(1.0, 3.0, 4, 4)
    assert meter.prompt_seconds == pytest.approx(1.5)


def test_but_never_less_than_its_share_of_the_tokens() -> None:
    meter = StepMeter()
    meter.note(0.0, 5.0, 0, 64)
    meter.note(6.0, 8.0, 3, 1)
    assert meter.prompt_seconds == pytest.approx(1.5)


def test_a_step_launched_behind_another_begins_when_that_one_ends() -> None:
    meter = StepMeter()
    meter.note(0.0, 3.0, 10, 0)
    meter.note(1.0, 5.0, 10, 0)
    assert meter.prompt_seconds == pytest.approx(5.0)


def test_the_mean_follows_a_change() -> None:
    meter = StepMeter()
    for second in range(1000):
        meter.note(second, second + 0.5, 0, 1)
    for second in range(2000, 2000 + 5 * HORIZON):
        meter.note(second, second + 0.25, 0, 1)
    assert meter.decode_step == pytest.approx(0.25, abs=0.01)


def test_the_next_launch_is_due_shortly_before_a_step_like_the_fastest_guess_would_end() -> None:
    meter = StepMeter()
    meter.note(0.0, 0.5, 0, 4)
    meter.note(0.4, 1.2, 0, 4)  # it ran for 0.7, the mean is 0.6
    assert meter.due(1.1) == pytest.approx(1.2 + 0.6 - HEAD_START_S)  # launched behind it: begins as it ends
    assert meter.due(5.0) == pytest.approx(5.0 + 0.6 - HEAD_START_S)
    meter.note(5.0, 5.1, 0, 1)
    assert meter.due(5.05) == pytest.approx(5.1 + 0.1 - HEAD_START_S), "a fuller batch's mean would be late"
