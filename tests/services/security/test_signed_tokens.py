"""Signed tokens: what is taken, and every way in which one is not."""

import base64
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from twostroke.errors import ConfigError, PermissionDenied, Unauthenticated
from twostroke.services.security.limits import Limits
from twostroke.services.security.signed_tokens import INVALID, Bearer, Expected, SignedTokens

EXPECTED = Expected("twostroke", "https://login.example/")
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
PRIVATE: dict[str, Any] = {"RS256": RSA, "ES256": EC, "EdDSA": ED}


def pem(key: Any) -> bytes:
    return bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def jwk(algorithm: str, key: Any, **more: Any) -> dict[str, Any]:
    maker: Any = jwt.get_algorithm_by_name(algorithm)
    return {**maker.to_jwk(key.public_key(), as_dict=True), **more}


def claims(**changes: Any) -> dict[str, Any]:
    now = int(time.time())
    whole = {"sub": "acme", "aud": "twostroke", "iss": "https://login.example/", "exp": now + 300, "iat": now} | changes
    return {name: value for name, value in whole.items() if value is not None}


def token(algorithm: str = "ES256", kid: str | None = None, key: Any = None, **changes: Any) -> str:
    headers = {"kid": kid} if kid is not None else None
    return jwt.encode(claims(**changes), key or PRIVATE[algorithm], algorithm, headers=headers)


def encoded(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def tokens(path: Path) -> SignedTokens:
    """By a set with a key of each kind."""
    keys = [jwk(name, key, kid=f"k-{name}") for name, key in PRIVATE.items()]
    path.write_text(json.dumps({"keys": keys}))
    return SignedTokens(path, EXPECTED)


@pytest.mark.parametrize("algorithm", PRIVATE)
@pytest.mark.parametrize("kind", ["pem", "jwks", "no kid"])
def test_what_is_signed_is_taken(path: Path, algorithm: str, kind: str) -> None:
    key = PRIVATE[algorithm]
    if kind == "pem":
        path.write_bytes(pem(key))
    else:
        path.write_text(json.dumps({"keys": [jwk(algorithm, key, **({"kid": "a"} if kind == "jwks" else {}))]}))
    checks = SignedTokens(path, EXPECTED)
    for kid in (None, "a"):
        assert checks.check(token(algorithm, kid)) == Bearer("acme", False)


@pytest.mark.parametrize("algorithm", PRIVATE)
def test_a_set_finds_its_key(tokens: SignedTokens, algorithm: str) -> None:
    assert tokens.check(token(algorithm, f"k-{algorithm}")).tenant == "acme"
    assert tokens.check(token(algorithm)).tenant == "acme"
    with pytest.raises(Unauthenticated, match=INVALID):
        tokens.check(token(algorithm, "k-other"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"exp": int(time.time()) - 60}, "the token has expired"),
        ({"exp": None}, "lacks the claim 'exp'"),
        ({"exp": "soon"}, INVALID),
        ({"nbf": int(time.time()) + 86_400}, "not valid yet"),
        ({"aud": "others"}, "another audience"),
        ({"aud": ["others", "more"]}, "another audience"),
        ({"aud": None}, "lacks the claim 'aud'"),
        ({"iss": "https://evil.example/"}, "another issuer"),
        ({"iss": None}, "lacks the claim 'iss'"),
    ],
)
def test_claims_that_do_not_hold(tokens: SignedTokens, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(Unauthenticated) as refused:
        tokens.check(token(**changes))
    assert told in refused.value.message


def test_several_audiences_and_a_clock_that_is_a_little_off(tokens: SignedTokens) -> None:
    tokens.check(token(aud=["others", "twostroke"]))
    tokens.check(token(exp=int(time.time()) - 5))
    tokens.check(token(nbf=int(time.time()) + 5))


def test_tampered_ones(tokens: SignedTokens) -> None:
    head, body, signature = token("EdDSA").split(".")
    other = encoded(claims(sub="victim"))
    for forged in (
        f"{head}.{other}.{signature}",
        f"{head}.{body}.",
        f"{head}.{body}.{'A' * len(signature)}",
        f"{head}.{body}",
        f"{head}.{body}.{signature}.{signature}",
        f"{encoded({'alg': 'EdDSA', 'kid': ['k-EdDSA']})}.{body}.{signature}",
        f"{encoded({'alg': 'EdDSA', 'crit': ['x'], 'x': 1})}.{body}.{signature}",
        token("EdDSA", key=ed25519.Ed25519PrivateKey.generate()),
        token("RS256", key=rsa.generate_private_key(public_exponent=65537, key_size=2048)),
    ):
        with pytest.raises(Unauthenticated) as refused:
            tokens.check(forged)
        assert refused.value.message == INVALID


@pytest.mark.parametrize(
    "algorithm", ["none", "None", "HS256", "HS512", "RS384", "PS256", "ES384", "", 7, None, ["RS256"]]
)
def test_other_algorithms(tokens: SignedTokens, algorithm: Any) -> None:
    with pytest.raises(Unauthenticated, match=r"algorithm|not valid"):
        tokens.check(f"{encoded({'alg': algorithm, 'typ': 'JWT'})}.{encoded(claims())}.c2ln")


def test_a_public_key_is_no_secret_to_sign_with(path: Path) -> None:
    """The old attack: the verifier's public key, as the secret of an HMAC."""
    path.write_bytes(pem(RSA))
    import hashlib
    import hmac

    signed = f"{encoded({'alg': 'HS256'})}.{encoded(claims())}"
    mac = hmac.new(pem(RSA), signed.encode(), hashlib.sha256).digest()
    with pytest.raises(Unauthenticated, match="algorithm"):
        SignedTokens(path, EXPECTED).check(f"{signed}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}")


@pytest.mark.parametrize(
    "text", ["", ".", "..", "...", "a.b.c", "\0", "é.é.é", "eyJ.eyJ.eyJ", "[" * 4000, encoded([1])]
)
def test_nonsense(tokens: SignedTokens, text: str) -> None:
    with pytest.raises(Unauthenticated):
        tokens.check(text)


@pytest.mark.parametrize("body", [[], "x", 7, None, {"exp": {}}, {"aud": {}}])
def test_bodies_that_are_signed_and_wrong(tokens: SignedTokens, body: Any) -> None:
    signed = jwt.PyJWS().encode(json.dumps(body).encode(), EC, "ES256")
    with pytest.raises(Unauthenticated):
        tokens.check(signed)


@pytest.mark.parametrize("tenant", [None, "a b", "-", "", "x" * 129])
def test_a_token_must_name_a_tenant(tokens: SignedTokens, tenant: Any) -> None:
    with pytest.raises(PermissionDenied, match="'sub' does not name a tenant"):
        tokens.check(token(sub=tenant))


def test_another_claim_and_the_admin_s_scope(path: Path) -> None:
    path.write_bytes(pem(EC))
    checks = SignedTokens(path, Expected("twostroke", "https://login.example/", "org", "ops"))
    assert checks.check(token(org="o1")) == Bearer("o1", False)
    assert checks.check(token(org="o1", scope="read ops")) == Bearer("o1", True)
    assert checks.check(token(org="o1", scp=["ops"])) == Bearer("o1", True)
    for scope in ("devops", "opsx", 7, {"ops": 1}, None):
        assert not checks.check(token(org="o1", scope=scope)).admin
    nobody = SignedTokens(path, Expected("twostroke", "https://login.example/", "org", ""))
    assert not nobody.check(token(org="o1", scope="")).admin


def test_a_token_may_hold_its_tenant_s_limits(path: Path, tokens: SignedTokens) -> None:
    limits = {"max_requests": 3, "output_tokens_per_minute": 900, "priority": -1}
    assert tokens.check(token(twostroke_limits=limits)).limits == Limits(**limits)
    assert tokens.check(token(twostroke_limits={})).limits == Limits()
    for wrong in ({"max_request": 3}, {"max_requests": "3"}, {"max_requests": -1}, {"priority": True}, [3], "x", 7):
        with pytest.raises(PermissionDenied, match="'twostroke_limits'"):
            tokens.check(token(twostroke_limits=wrong))
    for claim, found in (("quota", Limits(max_requests=1)), ("", Limits())):
        checks = SignedTokens(path, replace(EXPECTED, limits_claim=claim))
        assert checks.check(token(twostroke_limits="x", quota={"max_requests": 1})).limits == found


def test_keys_are_replaced(path: Path) -> None:
    now = [0.0]
    path.write_bytes(pem(EC))
    checks = SignedTokens(path, EXPECTED, clock=lambda: now[0])
    path.write_bytes(pem(ED))
    checks.check(token("ES256"))
    now[0] += 2
    checks.check(token("EdDSA"))
    with pytest.raises(Unauthenticated):
        checks.check(token("ES256"))


def private_pem() -> bytes:
    kind = serialization.PrivateFormat.PKCS8
    return EC.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())


def key_set(*keys: Any) -> bytes:
    return json.dumps({"keys": keys}).encode()


SMALL = rsa.generate_private_key(public_exponent=65537, key_size=1024)
BAD_FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "takes a JSON Web Key Set"),
    "private": (private_pem, "private key"),
    "small": (lambda: pem(SMALL), "takes a JSON Web Key Set"),
    "curve": (lambda: pem(ec.generate_private_key(ec.SECP384R1())), "takes a JSON Web Key Set"),
    "secret": (lambda: key_set({"kty": "oct", "k": "c2VjcmV0"}), "secret key"),
    "private set": (lambda: key_set(jwk("ES256", EC) | {"d": "AA"}), "secret key"),
    "no set": (lambda: b"{}", "no JSON Web Key Set"),
    "no objects": (lambda: key_set(1), "no JSON Web Key Set"),
    "cut": (lambda: b'{"keys": [', "no JSON Web Key Set"),
    "deep": (lambda: b'{"keys": ' + b"[" * 100_000, "no JSON Web Key Set"),
    "none": (lambda: key_set(), "1 to 256"),
    "none of use": (lambda: key_set({"kty": "RSA"}, {"kty": "x"}, jwk("RS256", RSA, use="enc")), "1 to 256"),
    "twins": (lambda: key_set(jwk("ES256", EC, kid="a"), jwk("EdDSA", ED, kid="a")), "share one `kid`"),
    "other use": (lambda: key_set(jwk("RS256", RSA, alg="RS512")), "1 to 256"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_will_not_do(path: Path, name: str) -> None:
    make, told = BAD_FILES[name]
    path.write_bytes(make())
    with pytest.raises(ConfigError) as refused:
        SignedTokens(path, EXPECTED)
    assert told in refused.value.message
    assert refused.value.field == "jwt_keys"


def test_keys_for_other_uses_are_left_out(path: Path) -> None:
    path.write_bytes(key_set(jwk("RS256", RSA, use="enc", kid="e"), {"kty": "new"}, jwk("ES256", EC, kid="s")))
    checks = SignedTokens(path, EXPECTED)
    checks.check(token("ES256"))
    with pytest.raises(Unauthenticated):
        checks.check(token("RS256"))
