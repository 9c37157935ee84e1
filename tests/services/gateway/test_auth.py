"""The authentication core: headers in, a tenant or a refusal out."""

import json
from pathlib import Path

import pytest

from twostroke.errors import ConfigError, Overloaded, PermissionDenied, Unauthenticated
from twostroke.services.gateway.auth import Authenticator
from twostroke.services.gateway.security import authenticator
from twostroke.services.gateway.wrong_keys import WrongKeys
from twostroke.services.security.api_keys import new_key
from twostroke.services.security.limits import Limits
from twostroke.services.security.signed_tokens import Bearer
from twostroke.services.security.tenant import ANYONE, Tenant
from twostroke.services.settings import GatewaySettings


class Tokens:
    """Takes one token."""

    def check(self, token: str) -> Bearer:
        if token != "a.b.c":
            raise Unauthenticated("the token is not valid")
        return Bearer("acme", True, Limits(max_requests=5, requests_per_minute=6))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def key_in(path: Path, tenant: str = "acme", expires: float | None = None, **limits: int) -> str:
    key, kept = new_key(tenant, expires=expires, limits=Limits(**limits))
    with path.open("a") as file:
        file.write(kept.line() + "\n")
    return key


def test_without_keys_everybody_is_anyone() -> None:
    auth = Authenticator()
    assert not auth.enabled
    assert auth.authenticate([]) is ANYONE
    assert auth.authenticate([("authorization", "Basic x")]) is ANYONE


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER  ", " Bearer "])
@pytest.mark.parametrize("name", ["authorization", "Authorization", "AUTHORIZATION"])
def test_headers_of_every_protocol(path: Path, name: str, scheme: str) -> None:
    key = key_in(path, max_requests=3)
    auth = Authenticator(path)
    wanted = Tenant("acme", False, Limits(max_requests=3))
    assert auth.authenticate([("x", "y"), (name, scheme + key)]) == wanted
    assert auth.authenticate([(name.encode(), (scheme + key).encode()), (b"x", b"\xff")]) == wanted
    assert auth.authenticate([(name, (scheme + key).encode())]) == wanted


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "no credentials"),
        ("", "another kind"),
        ("Bearer", "another kind"),
        ("Bearer ", "another kind"),
        ("Basic dXNlcg==", "another kind"),
        ("tsk_0", "another kind"),
        (b"Bearer \xff\xfe", "another kind"),
        ("Bearer " + "x" * 9000, "longer than 8192"),
        ("Bearer x", "not valid"),
        ("Bearer a.b.c", "not valid"),
    ],
)
def test_refusals_tell_what_to_do_and_not_what_there_is(path: Path, value: str | bytes | None, told: str) -> None:
    key_in(path)
    with pytest.raises(Unauthenticated) as refused:
        Authenticator(path).authenticate([("authorization", value)] if value is not None else [])
    assert told in refused.value.message
    assert "acme" not in refused.value.message
    assert "x" * 20 not in refused.value.message


def test_two_credentials_are_one_too_many(path: Path) -> None:
    key = key_in(path)
    header = ("authorization", f"Bearer {key}")
    with pytest.raises(Unauthenticated, match="several"):
        Authenticator(path).authenticate([header, header])


def test_tokens_beside_keys_and_alone(path: Path) -> None:
    key = key_in(path, max_requests=2)
    both, alone = Authenticator(path, Tokens()), Authenticator(None, Tokens(), default=Limits(7, 7, 8))
    of_file = Limits(max_requests=2)
    assert both.authenticate([("authorization", f"Bearer {key}")]) == Tenant("acme", False, of_file)
    assert both.authenticate([("authorization", "Bearer a.b.c")]) == Tenant("acme", True, Limits(2, 6))
    assert alone.authenticate([("authorization", "Bearer a.b.c")]) == Tenant("acme", True, Limits(5, 6, 8))
    for auth in (both, alone):
        with pytest.raises(Unauthenticated):
            auth.authenticate([("authorization", f"Bearer {new_key('acme')[0]}")])
        with pytest.raises(Unauthenticated):
            auth.authenticate([("authorization", "Bearer a.b.d")])


def test_keys_come_go_and_expire(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.services.security.watched_file.LOOK_S", 0.0)
    now = [1000.0]
    first = key_in(path)
    auth = Authenticator(path, clock=lambda: now[0])
    second = key_in(path, "umbrella", expires=2000)

    def name(key: str) -> str:
        return auth.authenticate([("authorization", f"Bearer {key}")]).name

    assert (name(first), name(second)) == ("acme", "umbrella")
    now[0] = 2000.0
    with pytest.raises(Unauthenticated, match="expired"):
        name(second)
    path.write_text("".join(line for line in path.open() if json.loads(line)["tenant"] != "acme"))
    with pytest.raises(Unauthenticated, match="not valid"):
        name(first)
    now[0] = 1999.0
    path.unlink()
    assert name(second) == "umbrella"  # a file that is gone withdraws nothing


def test_wrong_keys_of_an_address_are_limited(path: Path) -> None:
    key, other = key_in(path), key_in(path, "umbrella")
    auth = Authenticator(path, wrong=WrongKeys(3))
    right, wrong = [("authorization", f"Bearer {key}")], [("authorization", "Bearer tsk_0")]
    assert auth.authenticate(right, "ipv4:1.2.3.4:5").name == "acme"
    for headers in ([], [("authorization", "Basic x")], [("authorization", "Bearer")]):
        for _ in range(5):  # that is no guess
            with pytest.raises(Unauthenticated):
                auth.authenticate(headers, "1.2.3.4")
    for port in range(3):
        with pytest.raises(Unauthenticated):
            auth.authenticate(wrong, f"ipv4:1.2.3.4:{port}")
    for headers in (wrong, [("authorization", f"Bearer {other}")]):
        with pytest.raises(Overloaded, match="too many wrong keys"):
            auth.authenticate(headers, "1.2.3.4")
    assert auth.authenticate(right, "1.2.3.4").name == "acme"
    assert auth.authenticate([("authorization", f"Bearer {other}")], "1.2.3.5").name == "umbrella"
    assert auth.authenticate([("authorization", f"Bearer {other}")], "1.2.3.4").name == "umbrella"
    assert key not in repr(auth.identify(right))


def settings(**values: object) -> GatewaySettings:
    return GatewaySettings(**values)  # type: ignore[arg-type]


def test_made_of_settings(tmp_path: Path, path: Path) -> None:
    assert not authenticator(settings()).enabled
    key = key_in(path)
    made = authenticator(settings(api_keys=path, tenant_requests=5))
    assert made.authenticate([("authorization", f"Bearer {key}")]).limits.max_requests == 5
    with pytest.raises(ConfigError, match="api_keys: cannot read"):
        authenticator(settings(api_keys=tmp_path / "none"))
    for given in ({}, {"jwt_audience": "a"}, {"jwt_issuer": "i"}):
        with pytest.raises(ConfigError, match=r"jwt_(audience|issuer): got nothing"):
            authenticator(settings(jwt_keys=path, **given))
    with pytest.raises(ConfigError, match="jwt_keys"):
        authenticator(settings(jwt_keys=tmp_path / "none", jwt_audience="a", jwt_issuer="i"))


def test_denied_is_another_error_than_unknown() -> None:
    assert not issubclass(PermissionDenied, Unauthenticated)
