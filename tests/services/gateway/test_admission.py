"""Admission: a count with an end."""

import asyncio

import pytest

from twostroke.errors import Overloaded, Unavailable
from twostroke.services.gateway.admission import Admission


async def test_refuses_over_the_limit_at_once_and_says_when_to_come_back() -> None:
    admission = Admission(2)
    with admission.slot(), admission.slot():
        with pytest.raises(Overloaded) as caught, admission.slot():
            pass
        assert caught.value.retry_after_s is not None
        assert admission.inside == 2
    assert admission.inside == 0


async def test_a_place_is_freed_however_its_owner_ends() -> None:
    admission = Admission(1)
    with pytest.raises(ValueError, match="x"), admission.slot():
        raise ValueError("x")
    with pytest.raises(asyncio.CancelledError), admission.slot():
        raise asyncio.CancelledError
    with admission.slot():
        assert admission.inside == 1


async def test_idle_waits_for_the_last_one() -> None:
    admission = Admission(3)
    await admission.idle()
    with admission.slot():
        with admission.slot():
            waiting = asyncio.create_task(admission.idle())
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


async def test_closed_admits_nobody_but_lets_those_inside_end() -> None:
    admission = Admission(3)
    with admission.slot():
        admission.close()
        with pytest.raises(Unavailable), admission.slot():
            pass
        assert admission.inside == 1
    await admission.idle()
