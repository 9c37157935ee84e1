"""How clients reach a gateway: keys that do not show, files that will not do, options of commands."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from twostroke.errors import ConfigError
from twostroke.services.access_options import KEY_VARIABLE, access, access_options
from twostroke.services.client.access import OPEN, Access, Secret


def test_a_secret_does_not_show() -> None:
    given = Access(key=Secret(" tsk_secret\n"))
    assert "secret" not in f"{given} {given!r} {given.key}"
    assert given.metadata == (("authorization", "Bearer tsk_secret"),)
    assert OPEN.metadata == ()


@pytest.mark.parametrize("text", ["", "  \n", "a\nb", "é", "x" * 9000])
def test_what_cannot_be_a_key_is_refused_and_not_quoted(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api key") as refused:
        Secret(text)
    assert len(refused.value.message) < 120
    (tmp_path / "key").write_text(text)
    with pytest.raises(ConfigError, match="api key"):
        Secret.of_file(tmp_path / "key")


async def test_files_that_will_not_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ca: cannot read"):
        Access(ca=tmp_path / "none").channel("127.0.0.1:1")
    with pytest.raises(ConfigError, match="client_key: got nothing"):
        Access(cert=tmp_path / "none").channel("127.0.0.1:1")
    with pytest.raises(ConfigError, match="api_key_file: cannot read"):
        Secret.of_file(tmp_path / "none")


def test_options_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Access] = []

    @click.command()
    @access_options
    def command() -> None:
        seen.append(access())

    (tmp_path / "key").write_text("from-file\n")
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    run = CliRunner().invoke
    assert run(command, []).exit_code == 0
    monkeypatch.setenv(KEY_VARIABLE, "from-variable")
    assert run(command, ["--ca", "a", "--client-cert", "b", "--client-key", "c", "--server-name", "d"]).exit_code == 0
    assert run(command, ["--tls", "--api-key-file", str(tmp_path / "key")]).exit_code == 0
    assert seen[0] == OPEN
    assert (seen[1].ca, seen[1].cert, seen[1].cert_key, seen[1].name) == (Path("a"), Path("b"), Path("c"), "d")
    assert [one.key.value for one in seen[1:] if one.key is not None] == ["from-variable", "from-file"]
    assert seen[2].tls
