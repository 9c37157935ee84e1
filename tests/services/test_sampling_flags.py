"""Flags into messages: all of them, and absent ones stay absent."""

import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from twostroke.errors import ConfigError
from twostroke.services.sampling_flags import read_sampling_flags, read_stopping_flags, sampling_flags
from twostroke.v1 import inference_pb2 as pb


def read(*words: str) -> tuple[pb.Sampling, pb.Stopping]:
    """What a command with these flags asks for."""
    seen: list[tuple[pb.Sampling, pb.Stopping]] = []

    @click.command()
    @sampling_flags
    def command(**options: object) -> None:
        options["max_tokens"] = None
        seen.append((read_sampling_flags(options), read_stopping_flags(options)))

    result = CliRunner().invoke(command, words, catch_exceptions=False)
    if result.exit_code:
        raise click.UsageError(result.output)
    return seen[0]


def test_nothing_given_is_an_empty_message() -> None:
    sampling, stopping = read()
    assert sampling == pb.Sampling()
    assert stopping == pb.Stopping()


def test_every_field_has_a_flag() -> None:
    sampling, stopping = read(
        *shlex.split(
            "--temperature 0.5 --top-k 3 --top-p 0.25 --min-p 0.125 --typical-p 0.75 --repetition-penalty 1.5"
            " --presence-penalty -1 --frequency-penalty 2 --bias 3=-2.5 --bias 4=1e2 --allow-token 1 --allow-token 2"
            " --ban-token 9 --bad-word 'so bad' --seed 7 --stop X --stop-token 5 --include-stop --ignore-eos"
            " --min-tokens 6 --regex a+"
        )
    )
    assert sampling == pb.Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        typical_p=0.75,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias={3: -2.5, 4: 100.0},
        allowed_token_ids=[1, 2],
        banned_token_ids=[9],
        bad_words=["so bad"],
        seed=7,
        constraint=pb.Constraint(regex="a+"),
    )
    assert {field.name for field, _ in sampling.ListFields()} == set(pb.Sampling.DESCRIPTOR.fields_by_name)
    assert stopping == pb.Stopping(strings=["X"], token_ids=[5], include_stop=True, ignore_eos=True, min_tokens=6)


@pytest.mark.parametrize("bias", ["", "3", "=1", "3=", "3=nan", "3=inf", "-3=1", "x=1", "4294967296=1", "\u0663=1"])
def test_a_bias_that_is_none(bias: str) -> None:
    with pytest.raises(ConfigError, match="takes a token id and a number"):
        read("--bias", bias)


def test_what_an_answer_must_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text('{"type": "string", "const": "é"}', encoding="utf-8")
    text = file.read_text(encoding="utf-8")
    for words, constraint in (
        (("--json-object",), pb.Constraint(json_object=True)),
        (("--json-schema", str(file)), pb.Constraint(json_schema=text)),
        (("--choice", "ja", "--choice", "nein"), pb.Constraint(choice=pb.Choice(texts=["ja", "nein"]))),
        (("--grammar", str(file)), pb.Constraint(grammar=text)),
    ):
        assert read(*words)[0] == pb.Sampling(constraint=constraint)
    with pytest.raises(ConfigError, match="one of them"):
        read("--regex", "a", "--choice", "b")
    with pytest.raises(click.UsageError):
        read("--json-schema", str(tmp_path / "nowhere"))
