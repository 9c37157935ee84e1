"""The bench command: its options, its files, sweeps, Ctrl-C; against a real gateway in front of stand-in workers."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from twostroke.errors import ConfigError
from twostroke.services.cli import main
from twostroke.services.commands.bench import bench, make_plan, parse_labels, parse_prefix, parse_sweep
from twostroke.services.load.bench import BenchPlan, limits_of
from twostroke.services.load.lengths import LogNormal, Uniform
from twostroke.services.supervisor.machine import free_ports
from twostroke.v1 import inference_pb2 as pb

from .cluster import cluster, until
from .pty_session import on_terminal
from .stand_in_worker import Script, StandIn

LONG = list(range(10, 200))


def pair(**script: Any) -> tuple[StandIn, StandIn]:
    return (
        StandIn("prefill", "p-0", Script(tokens=LONG, **script)),
        StandIn("decode", "d-0", Script(tokens=LONG, **script)),
    )


def plan(*words: str) -> BenchPlan:
    whole = click.Context(main, **main.context_settings)
    context = bench.make_context("bench", list(words), parent=whole)
    return make_plan(context.params)


async def run(*words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "twostroke.services.cli", "bench", *words,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode(), err.decode()


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_options_become_a_plan() -> None:
    made = plan("--input", "10-20", "--output", "lognormal:30:0.5", "--shared-prefix", "64:3", "--seed", "7")
    assert (made.spec.input, made.spec.output) == (Uniform(10, 20), LogNormal(30, 0.5))
    assert (made.spec.prefix_tokens, made.spec.prefix_groups, made.spec.seed) == (64, 3, 7)
    assert (made.concurrencies, made.rate, made.sweep, made.warm_up, made.options.ignore_eos) == (
        (4,), None, False, 2, True,
    )  # fmt: skip
    assert made.run_options(4).requests == 32
    assert made.run_options(50).requests == 200
    assert plan("--duration", "3").run_options(4).requests is None
    assert plan("--duration", "3", "--requests", "5").run_options(4).requests == 5
    made = plan("--sweep", "1,8,2", "--respect-eos", "--label", "gpu=H200", "--label", "mode_2=a=b")
    assert (made.concurrencies, made.sweep, made.options.ignore_eos) == ((1, 8, 2), True, False)
    assert made.labels == {"gpu": "H200", "mode_2": "a=b"}
    assert plan().spec.seed != plan().spec.seed  # drawn, so that a second run does not find the prompts cached


def test_points_name_the_load() -> None:
    made = plan("--rate", "2.5", "--shared-prefix", "64:3", "--seed", "7", "--label", "note=x")
    assert made.point(4, "tiny") == {
        "model": "tiny", "mode": "open", "rate": 2.5, "input": "512", "output": "128", "shared_prefix": "64:3",
        "seed": 7, "note": "x",
    }  # fmt: skip
    assert plan("--concurrency", "9", "--seed", "7").point(9, "tiny")["concurrency"] == 9
    assert made.title(4) == "2.5 requests a second, input 64 shared in 3 groups + 512, output 128, seed 7"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--rate", "1", "--concurrency", "2"], "rate"),
        (["--sweep", "1", "--rate", "2"], "sweep"),
        (["--plot", "x.png"], "plot"),
        (["--input", "many"], "input"),
        (["--output", "0"], "output"),
    ],
)
def test_options_that_do_not_fit(words: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*words)
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["", "1,", "0", "1,x", "1;2", "70000", ",".join(["1"] * 101)])
def test_sweeps_are_checked(text: str) -> None:
    with pytest.raises(ConfigError, match="sweep: got"):
        parse_sweep(text)


@pytest.mark.parametrize("text", ["", "5", "0:1", "5:0", "5:1:1", "a:b"])
def test_prefixes_are_checked(text: str) -> None:
    with pytest.raises(ConfigError, match="shared_prefix: got"):
        parse_prefix(text)


@pytest.mark.parametrize("text", ["", "a", "=b", "A=b", "1a=b"])
def test_labels_are_checked(text: str) -> None:
    with pytest.raises(ConfigError, match="label: got"):
        parse_labels((text,))


def test_limits_of_a_model() -> None:
    model = pb.GetModelResponse(
        context_length=100, max_input_tokens=90, max_output_tokens=80, vocabulary_size=10, eos_token_ids=[9],
        special_token_ids=[0, 9],
    )  # fmt: skip
    limits = limits_of(model)
    assert (limits.context, limits.max_input, limits.max_output) == (100, 90, 80)
    assert limits.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_a_run_with_its_files(tiny_llama_dir: Path, tmp_path: Path) -> None:
    p, d = pair()
    result, each = tmp_path / "load.jsonl", tmp_path / "each.jsonl"
    words = ["--requests", "12", "--input", "8", "--output", "4", "--seed", "3", "--shared-prefix", "16:2"]
    files = ["--json", str(result), "--per-request", str(each), "--label", "note=x"]
    async with cluster(tiny_llama_dir, p, d) as it:
        for _ in range(2):
            code, out, err = await run("--address", it.address, *words, *files)
            assert (code, err) == (0, "")
        assert len(d.submits) == 2 * 14  # warm-up too
        code, _, err = await run("--address", it.address, "--json", str(tmp_path / "no" / "file"))
        assert (code, err.startswith("error: json: cannot write")) == (2, True)
        await it.idle()
    assert out.splitlines()[0] == "4 at once, input 16 shared in 2 groups + 8, output 4, seed 3"
    assert out.splitlines()[1].startswith("12 of 12 requests succeeded in ")
    assert "│ time to first token" in out
    first, second = lines(result.read_text())  # appended
    stamp = {"value", "p99", "figures", "date"}
    assert {k: v for k, v in first.items() if k not in stamp} == {k: v for k, v in second.items() if k not in stamp}
    assert (first["bench"], first["model"], first["mode"], first["concurrency"]) == ("load", "llama", "closed", 4)
    assert (first["seed"], first["note"], first["unit"]) == (3, "x", "ms")
    assert first["figures"]["requests"] == 12
    assert first["command"].startswith("twostroke bench --address")
    assert [line["index"] for line in sorted(lines(each.read_text()), key=by_index)] == list(range(12))
    assert {(line["status"], line["prompt_tokens"], line["output_tokens"]) for line in lines(each.read_text())} == {
        ("OK", 24, 4)
    }


def by_index(line: Mapping[str, Any]) -> int:
    index: int = line["index"]
    return index


async def test_json_on_stdout_has_it_for_itself(tiny_llama_dir: Path) -> None:
    p, d = pair()
    words = ["--rate", "100", "--requests", "5", "--input", "8", "--output", "2", "--warmup", "0", "--json", "-"]
    async with cluster(tiny_llama_dir, p, d) as it:
        code, out, err = await run("--address", it.address, *words)
    (line,) = lines(out)
    assert (code, line["mode"], line["rate"], line["figures"]["requests"]) == (0, "open", 100.0, 5)
    assert abs(line["figures"]["lateness_p50"]) < 10_000  # ms; a timer may fire a fraction of one early
    assert "sent later than planned" in err
    assert len(d.submits) == 5


async def test_a_sweep(tiny_llama_dir: Path) -> None:
    p, d = pair()
    words = ["--sweep", "1,3", "--requests", "6", "--input", "8", "--output", "2", "--warmup", "2", "--json", "-"]
    async with cluster(tiny_llama_dir, p, d) as it:
        code, out, err = await run("--address", it.address, *words, "--seed", "1")
    assert code == 0
    assert [line["concurrency"] for line in lines(out)] == [1, 3]
    rows = [row.split()[:3] for row in err.splitlines() if re.match(r" +\d", row)]
    assert rows == [["1", "6", "0"], ["3", "6", "0"]]
    assert len(d.submits) == 2 + 12
    assert len({tuple(submit.prompt_ids) for submit in d.submits}) == 14  # no run finds another's prompts cached


async def test_failures(tiny_llama_dir: Path) -> None:
    p, d = pair()
    p.script.mute_after = d.script.mute_after = 1
    words = ["--requests", "3", "--input", "8", "--output", "4", "--timeout", "0.3", "--warmup", "1"]
    async with cluster(tiny_llama_dir, p, d) as it:
        code, out, _ = await run("--address", it.address, *words)
        assert code == 1
        assert out.startswith("warm-up: 1 failed with DEADLINE_EXCEEDED: ")
        assert "0 of 3 requests succeeded" in out
        assert "DEADLINE_EXCEEDED: 3 (100.0%), the first one: " in out
        code, out, err = await run("--address", it.address, "--input", "3000")
        assert (code, err.startswith("error: input: got 3000, the model takes prompts of up to 1920")) == (2, True)
        code, out, err = await run("--address", it.address, "--model", "other")
        assert (code, "NOT_FOUND" in err) == (1, True)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    code, out, err = await run("--address", address)
    assert (code, out, err.startswith(f"error: no gateway answers at {address}")) == (1, "", True)


async def test_a_gateway_without_workers(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, connected=0, workers=["127.0.0.1:1"]) as it:
        code, _, err = await run("--address", it.address)
    assert (code, err) == (1, f"error: the gateway at {it.address} has no worker that is ready\n")


async def test_ctrl_c_shows_what_was_seen(tiny_llama_dir: Path, tmp_path: Path) -> None:
    p, d = pair()
    result = tmp_path / "load.jsonl"
    words = ["--sweep", "3,5", "--requests", "60", "--input", "8", "--output", "4", "--warmup", "0"]
    async with cluster(tiny_llama_dir, p, d) as it:
        async with on_terminal("bench", "--address", it.address, *words, "--json", str(result)) as session:
            await until(lambda: len(d.submits) >= 60)
            await asyncio.sleep(0.01)  # the last one plays by the script that it found
            d.script = Script(tokens=LONG, mute_after=1)  # the second run hangs
            await until(lambda: len(d.live) == 5)
            session.type("\x03")
            await session.see("INCOMPLETE: ended early")
            await session.see("5*")
            assert await session.ends() == 130
        await it.idle()
    made = lines(result.read_text())
    assert [line["figures"]["complete"] for line in made] == [True, False]
    assert re.search(r"\n +3 +60 +0 ", session.text), repr(session.text)


async def test_ctrl_c_in_warm_up(tiny_llama_dir: Path) -> None:
    p, d = pair()
    p.script.mute_after = d.script.mute_after = 1
    async with cluster(tiny_llama_dir, p, d) as it:
        async with on_terminal("bench", "--address", it.address, "--input", "8", "--output", "4") as session:
            await until(lambda: len(d.live) == 2)
            session.type("\x03")
            await session.see("0 of 0 requests succeeded")
            await session.see("INCOMPLETE")
            assert await session.ends() == 130
        await it.idle()


async def test_the_progress_bar(tiny_llama_dir: Path) -> None:
    p, d = pair()
    p.script.mute_after = d.script.mute_after = 1
    words = ["--requests", "10", "--concurrency", "2", "--input", "8", "--output", "4", "--warmup", "0"]
    words += ["--timeout", "1"]
    async with (
        cluster(tiny_llama_dir, p, d) as it,
        on_terminal("bench", "--address", it.address, *words, term="xterm") as session,
    ):
        await session.see("2 at once load")
        await session.see("0 done, 2 running, 0 tokens")
        await session.see("2 failed")
        session.type("\x03")
        assert await session.ends() == 130
