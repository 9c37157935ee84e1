"""Chats in a pseudo terminal and through pipes, against a real gateway in front of stand-in workers."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from twostroke.engine.tokenizer import Tokenizer
from twostroke.services.commands import chat as chat_command
from twostroke.services.supervisor.machine import free_ports
from twostroke.v1 import worker_pb2

from ..cluster import Cluster, cluster, until
from ..pty_session import on_terminal
from ..stand_in_worker import FOREVER, Script, StandIn

ANSWER = "He was one of the two."


class World:
    """A cluster whose model always answers ANSWER, and what it was asked."""

    def __init__(self, it: Cluster, tokenizer: Tokenizer) -> None:
        self.it, self.tokenizer, self.address = it, tokenizer, it.address
        self.d = it.worker("d-0")

    def prompts(self) -> list[str]:
        """The prompts so far, through the chat template."""
        return [self.tokenizer.decode(submit.prompt_ids, skip_special=False) for submit in self.d.submits]

    def stall(self, after: int = FOREVER) -> None:
        """Answers end after so many tokens, and the stream does not."""
        for worker in self.it.workers:
            worker.script.mute_after = after


@asynccontextmanager
async def answering(tiny_llama_dir: Path) -> AsyncIterator[World]:
    tokenizer = Tokenizer.from_dir(tiny_llama_dir)
    script = {"tokens": tokenizer.encode(ANSWER)}
    p, d = StandIn("prefill", "p-0", Script(**script)), StandIn("decode", "d-0", Script(**script))  # type: ignore[arg-type]
    async with cluster(tiny_llama_dir, p, d) as it:
        yield World(it, tokenizer)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


OPEN = "<|im_start|>assistant\n"


async def piped(address: str, text: str, *words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "twostroke.services.cli", "chat", "--address", address, *words,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(text.encode("utf-8", "surrogateescape")), 40)
    return process.returncode or 0, out.decode(), err.decode()


async def test_a_conversation_in_a_terminal(tiny_llama_dir: Path) -> None:
    async with answering(tiny_llama_dir) as world:
        async with on_terminal("chat", "--address", world.address, "--system", "be kind") as session:
            await session.see(f"llama at {world.address}. /help tells")
            await session.see("> ")
            session.type("who?\r")
            await session.see(f"who?\n{ANSWER}\n[")
            await session.see("first token ")
            await session.see("tokens/s, prompt ")
            await session.see(" tokens, 5 cached]")
            await session.see("> ")
            session.type("and now?\r")
            await session.see(f"{ANSWER}\n[")
            await session.see("> ")
            session.type("\x04")
            assert await session.ends() == 0
        first = turn("system", "be kind") + turn("user", "who?")
        assert world.prompts() == [
            first + OPEN,
            first + turn("assistant", ANSWER) + turn("user", "and now?") + OPEN,
        ]


async def test_ctrl_c_stops_the_answer_and_not_the_program(tiny_llama_dir: Path) -> None:
    async with answering(tiny_llama_dir) as world:
        world.stall(after=5)
        part = world.tokenizer.decode(world.tokenizer.encode(ANSWER)[:5])
        async with on_terminal("chat", "--address", world.address) as session:
            await session.see("> ")
            session.type("one\r")
            await session.see(f"one\n{part}")
            await until(lambda: world.d.live)
            session.type("\x03")
            await session.see("[stopped after 5 tokens, first token ")
            await until(lambda: not world.d.live)  # while the program sits at its prompt
            assert world.it.gateway.admission.inside == 0
            world.stall()
            await session.see("> ")
            session.type("two\r")
            await session.see(f"two\n{ANSWER}\n[")
            await session.see("> ")
            session.type("/exit\r")
            assert await session.ends() == 0
        assert world.prompts()[1] == turn("user", "one") + turn("assistant", part) + turn("user", "two") + OPEN


async def test_ctrl_c_before_anything_came(tiny_llama_dir: Path) -> None:
    async with answering(tiny_llama_dir) as world:
        world.stall(after=0)
        async with on_terminal("chat", "--address", world.address) as session:
            await session.see("> ")
            session.type("one\r")
            await until(lambda: world.d.live)
            session.type("\x03")
            await session.see("[stopped after 0 tokens]")
            await session.see("the question is forgotten")
            world.stall()
            await session.see("> ")
            session.type("two\r")
            await session.see(ANSWER)
            await session.see("> ")
            session.type("\x04")
            assert await session.ends() == 0
        assert world.prompts()[1] == turn("user", "two") + OPEN


async def test_ctrl_c_while_typing_drops_the_line(tiny_llama_dir: Path) -> None:
    async with answering(tiny_llama_dir) as world:
        async with on_terminal("chat", "--address", world.address) as session:
            await session.see("> ")
            session.type("never se")
            await session.see("never se")
            await session.interrupt("Ctrl-D or /exit ends the chat.")
            await session.see("> ")
            session.type("a\\\rb")
            await session.see("... b")
            await session.interrupt("Ctrl-D or /exit")
            await session.see("> ")
            session.type("yes\r")
            await session.see(ANSWER)
            await session.see("> ")
            session.type("\x04")
            assert await session.ends() == 0
        assert world.prompts() == [turn("user", "yes") + OPEN]


def test_a_ctrl_c_right_after_another_does_not_end_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    typed = iter([KeyboardInterrupt(), None])

    def aside(text: str) -> None:
        told.append(text)
        if len(told) == 1:
            raise KeyboardInterrupt

    def read_line(*_: Any) -> None:
        if (line := next(typed)) is not None:
            raise line

    monkeypatch.setattr(chat_command, "_aside", aside)
    monkeypatch.setattr(chat_command.Terminal, "_read_line", read_line)
    nothing: Any = None
    terminal = chat_command.Terminal(nothing, nothing)
    terminal._person = True
    assert terminal.run() == 0
    assert told == ["\nCtrl-D or /exit ends the chat."] * 2


async def test_commands_blocks_and_editing(tiny_llama_dir: Path) -> None:
    async with answering(tiny_llama_dir) as world:
        async with on_terminal("chat", "--address", world.address, "--system", "old") as session:
            await session.see("> ")
            session.type("/help\r")
            await session.see("/reset         begin")
            session.type("/nonsense\r")
            await session.see("error: /nonsense is no command")
            await session.see("> ")
            session.type('"""a\r')
            await session.see("... ")
            session.type('b"""\r')
            await session.see(ANSWER)
            await session.see("> ")
            session.type("/system new\r")
            await session.see("Another system message.")
            session.type("/reset\r")
            await session.see("A new conversation.")
            await session.see("> ")
            session.type("xz\x02y\r")  # Ctrl-B goes back a character: line editing works
            await session.see(ANSWER)
            session.type("/system\r")
            await session.see("No system message.")
            await session.see("> ")
            session.type("c\r")
            await session.see(ANSWER)
            await session.see("> ")
            session.type("\x04")
            assert await session.ends() == 0
        later = turn("user", "xyz") + turn("assistant", ANSWER) + turn("user", "c") + OPEN
        assert world.prompts() == [
            turn("system", "old") + turn("user", "a\nb") + OPEN,
            turn("system", "new") + turn("user", "xyz") + OPEN,
            later,
        ]


async def test_an_error_does_not_end_a_chat_in_a_terminal(tiny_llama_dir: Path) -> None:
    async with answering(tiny_llama_dir) as world:
        world.d.script.mute_after, world.d.script.fail = 3, (worker_pb2.FAILURE_CODE_INVALID, "it refuses")
        part = world.tokenizer.decode(world.tokenizer.encode(ANSWER)[:3])
        async with on_terminal("chat", "--address", world.address) as session:
            await session.see("> ")
            session.type("one\r")
            await session.see(f"{part}\nerror: ")
            await session.see("it refuses")
            world.stall()
            world.d.script.fail = None
            await session.see("> ")
            session.type("two\r")
            await session.see(ANSWER)
            await session.see("> ")
            await world.it.gateway.stop()
            session.type("three\r")
            await session.see("error: ")  # in gRPC's words where the connection was still there when it was asked
            await session.see("> ")
            session.type("four\r")
            await session.see("error: no gateway answers at ")
            await session.see("> ")
            session.type("/exit\r")
            assert await session.ends() == 0
        assert world.prompts()[-1] == turn("user", "one") + turn("assistant", part) + turn("user", "two") + OPEN


async def test_through_a_pipe_there_is_no_decoration(tiny_llama_dir: Path) -> None:
    async with answering(tiny_llama_dir) as world:
        code, out, err = await piped(world.address, "one\n\n/reset\ntwo\\\nlines\n//three", "--temperature", "0")
        assert (code, out) == (0, f"{ANSWER}\n" * 3)
        assert ">" not in err
        assert err.count("first token ") == 3
        assert err.splitlines()[1] == "A new conversation."
        assert world.prompts()[2].endswith(
            turn("user", "two\nlines") + turn("assistant", ANSWER) + turn("user", "/three") + OPEN
        )
        assert [submit.params.temperature for submit in world.d.submits] == [0, 0, 0]
        code, out, err = await piped(world.address, "")
        assert (code, out, err) == (0, "", "")


async def test_sampling_flags_reach_the_worker(tiny_llama_dir: Path) -> None:
    async with answering(tiny_llama_dir) as world:
        flags = ["--temperature", "0.5", "--top-k", "7", "--top-p", "0.25", "--seed", "9", "--max-tokens", "3"]
        code, out, err = await piped(world.address, "one\n", *flags, "--stop", "nothing like it")
        assert (code, err.count("3 tokens (length reached)")) == (0, 1)
        params = world.d.submits[0].params
        assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.5, 7, 0.25, 9)
        assert params.max_tokens == 3
        assert ANSWER.startswith(out.removesuffix("\n"))


async def test_an_error_ends_a_pipe(tiny_llama_dir: Path) -> None:
    async with answering(tiny_llama_dir) as world:
        code, out, err = await piped(world.address, "one\n/nonsense\ntwo\n")
        assert (code, out) == (1, f"{ANSWER}\n")
        assert err.splitlines()[-1].startswith("error: /nonsense is no command")
        world.d.script.mute_after, world.d.script.fail = 3, (worker_pb2.FAILURE_CODE_INVALID, "it refuses")
        code, out, err = await piped(world.address, "one\ntwo\n")
        assert code == 1
        assert "it refuses" in err
        assert len(world.d.submits) == 2


async def test_bytes_that_are_no_text_do_not_end_it(tiny_llama_dir: Path) -> None:
    async with answering(tiny_llama_dir) as world:
        code, out, _ = await piped(world.address, "a\udcffb\n")
        assert (code, out) == (0, f"{ANSWER}\n")
        assert world.prompts() == [turn("user", "a\ufffdb") + OPEN]


async def test_ctrl_c_ends_a_pipe(tiny_llama_dir: Path) -> None:
    async with answering(tiny_llama_dir) as world:
        world.stall(after=2)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "twostroke.services.cli", "chat", "--address", world.address,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(b"one\ntwo\n")
        await until(lambda: world.d.live)
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readexactly(2), 20)
        process.send_signal(2)
        _, err = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 130
        assert b"Traceback" not in err
        assert len(world.d.submits) == 1


async def test_no_gateway() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    code, out, err = await piped(address, "hi\n")
    assert (code, out) == (1, "")
    assert err.startswith(f"error: no gateway answers at {address}: start one with `twostroke up`")
    assert len(err.splitlines()) == 1
    code, out, err = await piped(address, "hi\n", "--system", "\udcff")
    assert (code, err) == (2, "error: system: got bytes that are not utf-8, takes a text\n")


async def test_a_model_that_cannot_chat(tiny_llama_dir: Path, tmp_path: Path) -> None:
    for name in os.listdir(tiny_llama_dir):
        if name != "tokenizer_config.json":
            (tmp_path / name).symlink_to(tiny_llama_dir / name)
    async with cluster(tmp_path, StandIn("both", "b-0", model=tmp_path.name)) as it:
        code, out, err = await piped(it.address, "hi\n")
        assert (code, out) == (1, "")
        assert "has no chat template: use `twostroke generate --raw`" in err
