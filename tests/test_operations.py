"""docs/operations.md names only what there is: flags, variables, log lines, links."""

import re
from pathlib import Path

import click
import pytest

from twostroke.engine.wheel import WHEEL_VARIABLE
from twostroke.services.cli import main
from twostroke.services.configure import setting_variables

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def parameters() -> list[click.Parameter]:
    """Of all commands."""
    groups = [command for command in main.commands.values() if isinstance(command, click.Group)]
    commands = [*main.commands.values(), *(command for group in groups for command in group.commands.values())]
    return [parameter for command in commands for parameter in command.params]


def test_flags() -> None:
    known = {word for parameter in parameters() for word in parameter.opts}
    others = {"--build", "--host", "--port", "--worker-urls"}  # docker's, smg's
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)) - others
    assert len(named) > 15
    assert named <= known


def test_variables_and_commands() -> None:
    of_options = {parameter.envvar for parameter in parameters() if isinstance(parameter.envvar, str)}
    assert set(re.findall(r"TWOSTROKE_\w+", TEXT)) <= setting_variables() | of_options | {WHEEL_VARIABLE}
    for line in re.findall(r"`?twostroke ([a-z]+)[ `\n]", TEXT):
        assert isinstance(main.commands.get(line), click.Command), line


@pytest.mark.parametrize(
    "words",
    ["waiting for worker", "not met in", "refused: ", "no prefill worker: decode workers compute prompts themselves",
     "requests cannot be served: no decode worker", "killing it", "its death cannot be proven from here",
     "requests are cut", "takes an address that is free", "no gateway answers at",
     "requests are being served already", "tokens are to be computed for requests that came before",
     "keep the workers busy for about", "that it may have", "more urgent requests took its place",
     "too many wrong keys came from this address",
     "the client reads too slowly", "did not arrive whole"],
)  # fmt: skip
def test_lines_that_processes_say(words: str) -> None:
    assert words in TEXT
    assert any(words in file.read_text(encoding="utf-8") for file in (ROOT / "services").rglob("*.py"))


def test_links() -> None:
    for target in re.findall(r"\]\(([\w./-]+)\)", TEXT):
        assert (ROOT / "docs" / target).is_file(), target
