"""What is remembered of prefill workers."""

from twostroke.services.handover.known_writers import _REMEMBERED, KnownWriters


def test_a_life() -> None:
    writers = KnownWriters()
    assert not writers.linked(1)
    assert not writers.met(1)
    writers.up(1)
    assert writers.linked(1)
    assert writers.met(1)
    writers.down(1)
    assert not writers.linked(1)
    assert writers.met(1)
    assert writers.why_gone(1) is None
    writers.gone(1, "replaced", dead=False)
    assert writers.met(1)  # it may still hold tickets
    assert writers.why_gone(1) == "replaced"
    writers.gone(1, "dead", dead=True)
    assert not writers.met(1)
    assert writers.why_gone(1) == "dead"


def test_memory_is_bounded() -> None:
    writers = KnownWriters()
    for writer in range(_REMEMBERED + 1):
        writers.gone(writer, "", dead=True)
    assert writers.why_gone(0) is None
    assert writers.why_gone(_REMEMBERED) == ""
