"""`twostroke keys new`."""

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from twostroke.services.cli import main
from twostroke.services.gateway.auth import Authenticator
from twostroke.services.security.limits import Limits
from twostroke.services.security.tenant import Tenant


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["keys", "new", *words])


def test_it_prints_the_key_and_the_line(tmp_path: Path) -> None:
    limits = ("--max-requests", "7", "--output-tokens-per-minute", "900", "--priority", "-2")
    done = run("--tenant", "acme", *limits, "--admin")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    key, line = lines[1].strip(), lines[3]
    assert key.startswith("tsk_")
    assert key.rpartition("_")[2] not in line
    (tmp_path / "keys").write_text(line)
    found = Authenticator(tmp_path / "keys").authenticate([("authorization", f"Bearer {key}")])
    assert found == Tenant("acme", True, Limits(max_requests=7, output_tokens_per_minute=900, priority=-2))


def test_it_appends_to_a_file_that_others_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = [run("--tenant", name, "--file", str(path)).output.strip() for name in ("a", "b")]
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(path.read_text().rstrip("\n"))  # as an editor may leave it
    keys.append(run("--tenant", "c", "--file", str(path), "--days", "1").output.strip())
    auth = Authenticator(path)
    assert [auth.authenticate([("authorization", f"Bearer {key}")]).name for key in keys] == ["a", "b", "c"]
    assert not any(key in path.read_text() for key in keys)
    expires = json.loads(path.read_text().splitlines()[-1])["expires"]
    assert expires > time.strftime("%Y-%m-%d", time.gmtime())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "--tenant"),
        (("--tenant", "a b"), "tenant: got 'a b'"),
        (("--tenant", "a", "--max-requests", "-1"), "max-requests"),
        (("--tenant", "a", "--days", "0"), "days"),
        (("--tenant", "a", "--file", "/proc/none/keys"), "file: cannot write"),
    ],
)
def test_wrong_words(words: tuple[str, ...], told: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert told in done.output
    assert "tsk_" not in done.output
