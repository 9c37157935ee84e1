"""API keys and their file."""

import hmac
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.errors import ConfigError, Unauthenticated
from twostroke.services.security import api_keys
from twostroke.services.security.api_keys import INVALID, KeyRing, new_key, read_keys
from twostroke.services.security.limits import Limits


def ring(*lines: str) -> KeyRing:
    return read_keys("\n".join(lines).encode(), "keys.jsonl")


def test_a_key_is_found_by_what_its_line_keeps() -> None:
    pairs = [new_key(f"tenant-{i}", admin=i == 1, limits=Limits(max_requests=i or None)) for i in range(5)]
    keys = ring("# ours", "", *(kept.line() for _, kept in pairs), "")
    assert len(keys) == 5
    for i, (key, kept) in enumerate(pairs):
        assert keys.find(key, 0) == kept
        tenant = keys.tenant(kept, Limits(max_requests=9))
        assert (tenant.name, tenant.admin, tenant.limits.max_requests) == (f"tenant-{i}", i == 1, i or 9)


def test_the_line_does_not_hold_the_key() -> None:
    key, kept = new_key("acme")
    secret = key.rpartition("_")[2]
    assert len(key) == 60
    assert secret not in kept.line()
    assert secret not in repr(kept)
    other, other_kept = new_key("acme")
    assert other != key
    assert other_kept.salt != kept.salt
    assert len(kept.salt) == 16


KEY, KEPT = new_key("acme")


@given(st.data())
def test_no_other_key_is_taken(data: st.DataObject) -> None:
    key, kept = KEY, KEPT
    place = data.draw(st.integers(0, len(key) - 1))
    letter = data.draw(st.characters())
    if letter == key[place]:
        return
    with pytest.raises(Unauthenticated):
        ring(kept.line()).find(key[:place] + letter + key[place + 1 :], 0)


@pytest.mark.parametrize("change", ["", "cut", "long", "upper", "other", "unknown", "space"])
def test_wrong_keys_are_told_alike(change: str) -> None:
    key, kept = new_key("acme")
    other, _ = new_key("acme")
    wrong = {
        "": "",
        "cut": key[:-1],
        "long": key + "A",
        "upper": key.upper(),
        "other": key[:17] + other[17:],
        "unknown": other,
        "space": key + " ",
    }[change]
    with pytest.raises(Unauthenticated) as refused:
        ring(kept.line()).find(wrong, 0)
    assert refused.value.message == INVALID


def test_every_key_is_compared_once_and_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    hashed = Counter[str]()
    plain, digest = hmac.compare_digest, api_keys.digest_of

    def compare(a: bytes, b: bytes) -> bool:
        calls.append((len(a), len(b)))
        return plain(a, b)

    def hash_once(salt: bytes, key: str) -> bytes:
        hashed[key] += 1
        return digest(salt, key)

    key, kept = new_key("acme")
    keys = ring(kept.line())
    unknown, _ = new_key("acme")
    monkeypatch.setattr(hmac, "compare_digest", compare)
    monkeypatch.setattr(api_keys, "digest_of", hash_once)
    presented = [key, unknown, key[:-1] + ("A" if key[-1] != "A" else "B"), "nonsense"]
    for one in presented:
        try:
            keys.find(one, 0)
        except Unauthenticated:
            assert one != key
    assert calls == [(32, 32)] * 4
    assert hashed == dict.fromkeys(presented, 1)


def test_a_key_expires() -> None:
    key, kept = new_key("acme", expires=1000.0)
    keys = ring(kept.line())
    assert keys.find(key, 999.9).expires == 1000.0
    with pytest.raises(Unauthenticated, match="expired"):
        keys.find(key, 1000.0)
    with pytest.raises(Unauthenticated, match="not valid"):  # only its bearer learns that
        keys.find(key[:-1] + ("A" if key[-1] != "A" else "B"), 1000.0)


def line(**changes: Any) -> str:
    values = json.loads(new_key("acme")[1].line()) | changes
    return json.dumps({name: value for name, value in values.items() if value is not ...})


@pytest.mark.parametrize(
    "bad",
    [
        "tsk_0123456789ab_secret",
        "{",
        "[" * 100_000,
        "[]",
        '"x"',
        line(id=...),
        line(hash=...),
        line(tenant=...),
        line(hash="sha256$00$00"),
        line(hash=7),
        line(id="X"),
        line(id=3),
        line(tenant=""),
        line(tenant="a b"),
        line(tenant="x" * 129),
        line(admin="yes"),
        line(max_requests=-1),
        line(max_requests=True),
        line(max_requests=1.5),
        line(requests_per_minute="7"),
        line(input_tokens_per_minute=10**10),
        line(output_tokens_per_minute=-1),
        line(priority=1 << 31),
        line(max_request=3),
        line(expires="soon"),
        line(expires="2027-01-31T00:00:00"),
        line(expires=7),
    ],
    ids=lambda _: "line",  # what is in it is drawn anew by each process that runs tests
)
def test_a_wrong_line_is_named_and_never_quoted(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"^api_keys: keys.jsonl, line 2: ") as refused:
        ring(line(), bad)
    assert len(refused.value.message) < 200
    assert refused.value.field == "api_keys"
    assert "secret" not in refused.value.message


def test_lines_must_agree() -> None:
    first = line(max_requests=3)
    with pytest.raises(ConfigError, match="line 2: its id stands in an earlier line"):
        ring(first, first)
    with pytest.raises(ConfigError, match="line 2: max_requests differs"):
        ring(first, line(max_requests=4))
    keys = ring(first, line(), line(max_requests=3))
    assert keys.limits("acme") == Limits(max_requests=3)
    assert keys.limits("other") == Limits()


def test_a_file_without_a_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="twostroke keys new"):
        ring("# nothing")


def test_names_of_tenants() -> None:
    for name in ("a", "Acme-1", "user@example.com", "auth0|7", "x" * 128):
        new_key(name)
    for name in ("", "-a", "a b", "a\n", "x" * 129, "é"):
        with pytest.raises(ConfigError, match="tenant"):
            new_key(name)
