"""Failed steps are told to the log; an engine that fails every step is at its end."""

import pytest

from twostroke.engine.request import SequenceKey, SequenceOutput, StepResult, Token
from twostroke.errors import TwostrokeError
from twostroke.services.worker.step_faults import MOST_IN_A_ROW, StepFaults

ERROR = RuntimeError("device lost")


def failed(sequences: int = 1) -> StepResult:
    return StepResult(failures=[(SequenceKey(1, n, 0, 0), ERROR) for n in range(sequences)], progress=True)


def test_a_failed_step_is_logged_once_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    StepFaults().note(failed(3))
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is ERROR
    assert "3 sequences" in caplog.text
    StepFaults().note(StepResult())
    assert len(caplog.records) == 1


def test_too_many_in_a_row_are_the_end() -> None:
    faults = StepFaults()
    made = StepResult(outputs=[SequenceOutput(SequenceKey(1, 9, 0, 0), 0, [Token(5)], None, None)])
    for _ in range(3):
        for _ in range(MOST_IN_A_ROW - 1):
            faults.note(failed())
            faults.note(StepResult(progress=True))  # reserved something: no sign of a working device
        faults.note(made)
    for _ in range(MOST_IN_A_ROW - 1):
        faults.note(failed())
    with pytest.raises(TwostrokeError, match="in a row failed") as caught:
        faults.note(failed())
    assert caught.value.__cause__ is ERROR
