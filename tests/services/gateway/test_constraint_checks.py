"""Constraints are checked beside the loop: verdicts, bounds, and what hostile ones cost others (nothing)."""

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from twostroke.engine.constraint_text import MAX_TEXT
from twostroke.engine.request import Constraint, ConstraintKind
from twostroke.errors import InvalidRequest, Overloaded, TwostrokeError
from twostroke.services.gateway.constraint_checks import ConstraintChecks

K = ConstraintKind
GOOD = [
    Constraint(K.JSON_OBJECT),
    Constraint(K.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    Constraint(K.REGEX, r"\d+"),
    Constraint(K.CHOICE, '["ja", "nein"]'),
    Constraint(K.GRAMMAR, 'start: "a" | "b" start'),
]
CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(12000)) + '\nr12000: "a"'
SLOW = json.dumps({"type": "integer", "multipleOf": 999983})


async def refusal(checks: ConstraintChecks, constraint: Constraint) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await checks.check(constraint)
    assert caught.value.field == f"sampling.constraint.{constraint.kind.name.lower()}"
    return caught.value


@pytest.mark.parametrize(
    ("constraint", "says"),
    [
        (Constraint(K.JSON_SCHEMA, "{"), "JSON"),
        (Constraint(K.JSON_SCHEMA, "3"), "object"),
        (Constraint(K.JSON_SCHEMA, "[" * 100_000), "nested"),
        (Constraint(K.CHOICE, "[]"), "choice"),
        (Constraint(K.CHOICE, '["a", ""]'), "choice"),
        (Constraint(K.CHOICE, '["a", 1]'), "choice"),
        (Constraint(K.CHOICE, '"a"'), "choice"),
        (Constraint(K.GRAMMAR, " "), "empty"),
        (Constraint(K.REGEX, "\ud800"), "surrogate"),
        (Constraint(K.REGEX, "ä" * (MAX_TEXT // 2 + 1)), "bytes"),
    ],
)
async def test_what_the_text_alone_tells(constraint: Constraint, says: str) -> None:
    assert says in (await refusal(ConstraintChecks(None), constraint)).message


async def test_without_a_model_and_without_a_constraint() -> None:
    checks = ConstraintChecks(None)
    await checks.check(None)
    for constraint in GOOD:
        await checks.check(constraint)
    await checks.stop()


async def test_verdicts_of_the_compiler(tiny_llama_dir: Path) -> None:
    """In one process: each that it survives is judged by the next."""
    checks = ConstraintChecks(tiny_llama_dir, processes=1)
    bad = [
        (Constraint(K.JSON_SCHEMA, '{"uniqueItems": true, "type": "array"}'), "uniqueItems"),
        (Constraint(K.JSON_SCHEMA, '{"uniqueItems": true, "x-guidance": {"lenient": true}}'), "uniqueItems"),
        (Constraint(K.JSON_SCHEMA, '{"$ref": "#/nowhere"}'), "nowhere"),
        (Constraint(K.REGEX, "("), "unclosed"),
        (Constraint(K.REGEX, "(?=a)b"), "look-around"),
        (Constraint(K.REGEX, r"[^\s\S]"), "no output"),
        (Constraint(K.GRAMMAR, "start: begin"), "begin"),
        (Constraint(K.GRAMMAR, CHAIN), "too deeply nested"),  # it exhausts the stack: the process dies
        (Constraint(K.GRAMMAR, "start: " + '"a" ' * 65_530), "too large"),
    ]
    try:
        for constraint, says in bad:
            assert says in (await refusal(checks, constraint)).message, constraint.text[:50]
        for constraint in GOOD:
            await checks.check(constraint)
        killed = children()
        for child in killed:
            child.kill()
        psutil.wait_procs(killed, timeout=10)
        for constraint, says in bad:
            assert says in (await refusal(checks, constraint)).message
        assert not children(), "verdicts are kept: nobody was asked"
    finally:
        await checks.stop()


@pytest.mark.slow
async def test_a_slow_one_is_ended_and_others_do_not_wait_for_it(tiny_llama_dir: Path) -> None:
    checks = ConstraintChecks(tiny_llama_dir, compile_s=1.5)
    try:
        await checks.check(GOOD[1])  # a process is there
        slow = [asyncio.create_task(refusal(checks, Constraint(K.JSON_SCHEMA, SLOW))) for _ in range(5)]
        await asyncio.sleep(0.1)
        await checks.check(GOOD[2])
        await checks.check(GOOD[3])
        assert not any(task.done() for task in slow)
        for error in await asyncio.gather(*slow):  # what it comes to first depends on the machine
            assert "longer than 1.5 s" in error.message or "too large" in error.message
        await checks.check(GOOD[4])
    finally:
        await checks.stop()


async def test_what_takes_too_long_is_ended(tiny_llama_dir: Path) -> None:
    checks = ConstraintChecks(tiny_llama_dir, processes=1, compile_s=1.5)
    try:
        await checks.check(GOOD[1])
        (child,) = children()
        child.suspend()
        assert "takes longer than 1.5 s" in (await refusal(checks, GOOD[2])).message
        assert not child.is_running()
        await checks.check(GOOD[3])  # by another process
    finally:
        await checks.stop()


async def test_who_comes_when_the_last_one_leaves_is_answered(tiny_llama_dir: Path) -> None:
    checks = ConstraintChecks(tiny_llama_dir, processes=1)
    try:
        first = asyncio.create_task(checks.check(GOOD[0]))
        await asyncio.sleep(0)
        leaving = asyncio.create_task(checks.check(GOOD[1]))
        await asyncio.sleep(0.01)
        leaving.cancel()
        coming = asyncio.create_task(checks.check(GOOD[1]))
        await asyncio.gather(first, coming)
        assert leaving.cancelled()
    finally:
        await checks.stop()


@pytest.mark.slow
async def test_tenants_wait_for_what_runs_but_not_for_each_other(tiny_llama_dir: Path) -> None:
    checks = ConstraintChecks(tiny_llama_dir, processes=1, compile_s=1)
    try:
        await checks.check(GOOD[0])
        hostile = [
            asyncio.create_task(
                checks.check(Constraint(K.JSON_SCHEMA, SLOW.replace("999983", str(999983 + 2 * n))), "a")
            )
            for n in range(8)
        ]
        await asyncio.sleep(0.1)
        await checks.check(GOOD[1], "b")
        assert not hostile[2].done(), "one was running, and its turn came next"
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)
        await checks.check(GOOD[2], "a")
    finally:
        await checks.stop()


@pytest.mark.slow
async def test_one_that_takes_too_much_memory_ends_its_process(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here more than nothing: what a compiler can take within its time is less than it may."""
    monkeypatch.setattr("twostroke.services.gateway.grammar_process.CHILD", f"{__name__.rpartition('.')[0]}.none")
    checks = ConstraintChecks(tiny_llama_dir, processes=1)
    with pytest.raises(TwostrokeError, match="could not be started"):
        await checks.check(GOOD[0])
    monkeypatch.undo()
    await checks.check(GOOD[0])
    (child,) = children()
    child.rlimit(psutil.RLIMIT_AS, (child.memory_info().vms, child.memory_info().vms))
    many = json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(4000)}})
    assert "too large" in (await refusal(checks, Constraint(K.JSON_SCHEMA, many))).message
    await checks.check(GOOD[1])
    await checks.stop()


@pytest.mark.slow
async def test_who_leaves_ends_what_waits_and_what_is_too_many_is_refused(tiny_llama_dir: Path) -> None:
    checks = ConstraintChecks(tiny_llama_dir, processes=1, compile_s=2, wait_s=0.5)
    try:
        first = asyncio.create_task(refusal(checks, Constraint(K.JSON_SCHEMA, SLOW)))
        await asyncio.sleep(0.05)
        leaving = [asyncio.create_task(checks.check(Constraint(K.REGEX, "a" * n))) for n in range(1, 65)]
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded):
            await checks.check(GOOD[2])
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        with pytest.raises(Overloaded):  # within wait_s the only process is not free
            await checks.check(GOOD[2])
        await first
        await checks.check(GOOD[2])
    finally:
        await checks.stop()


async def test_a_process_that_somebody_ended_is_replaced(tiny_llama_dir: Path) -> None:
    """What it was not asked is not its fault."""
    checks = ConstraintChecks(tiny_llama_dir, processes=1)
    try:
        await checks.check(GOOD[0])
        (child,) = children()
        child.kill()
        psutil.wait_procs([child], timeout=10)
        await checks.check(GOOD[1])
        assert children() != [child]
    finally:
        await checks.stop()


def children() -> list[psutil.Process]:
    """The processes that compile."""
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in living if "grammar_child" in " ".join(child.cmdline())]


async def test_stopping_leaves_no_process(tiny_llama_dir: Path) -> None:
    checks = ConstraintChecks(tiny_llama_dir, processes=1)
    waiting = asyncio.create_task(checks.check(Constraint(K.JSON_SCHEMA, SLOW)))  # for longer than this takes
    await asyncio.sleep(0.05)
    await checks.stop()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not children()
