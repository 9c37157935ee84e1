"""Wrong keys: how many an address may show, who is let in all the same, and that both tables are bounded."""

import pytest

from twostroke.errors import Overloaded
from twostroke.services.gateway import wrong_keys
from twostroke.services.gateway.ledger import LocalLedger
from twostroke.services.gateway.wrong_keys import WrongKeys, address_of


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def test_so_many_a_minute_then_none() -> None:
    clock = Clock()
    wrong = WrongKeys(6, clock)
    for _ in range(6):
        wrong.failed("1.2.3.4")
    for _ in range(3):  # what is refused does not count: it is not looked at
        with pytest.raises(Overloaded, match="too many wrong keys") as caught:
            wrong.failed("1.2.3.4")
        assert caught.value.retry_after_s == 10.0
    with pytest.raises(Overloaded):
        wrong.right("a good key", "1.2.3.4")
    wrong.failed("1.2.3.5")
    wrong.right("a good key", "1.2.3.5")
    clock.now += 10_000_000_000
    wrong.failed("1.2.3.4")
    with pytest.raises(Overloaded):
        wrong.failed("1.2.3.4")
    assert (wrong.failures, wrong.refusals) == (12, 5)


def test_whoever_was_right_before_is_let_in() -> None:
    wrong = WrongKeys(2, Clock())
    wrong.right("good", "1.2.3.4")
    for _ in range(2):
        wrong.failed("1.2.3.4")
    wrong.right("good", "1.2.3.4")
    assert wrong.proven("good")
    assert not wrong.proven("goo")
    with pytest.raises(Overloaded):
        wrong.right("better", "1.2.3.4")
    assert not wrong.proven("better")


def test_without_a_limit_or_an_address_nothing_is_kept() -> None:
    off, nowhere = WrongKeys(0), WrongKeys(1, Clock())
    for _ in range(100):
        off.failed("1.2.3.4")
        off.right("good", "1.2.3.4")
        nowhere.failed("")
        nowhere.right("good", "")
    assert not off._peers
    assert not off._proven
    assert not nowhere._peers


def test_the_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrong_keys, "MAX_PEERS", 5)
    monkeypatch.setattr(wrong_keys, "MAX_PROVEN", 3)
    wrong = WrongKeys(2, Clock())
    for number in range(20):
        wrong.failed(f"1.2.3.{number}")
        wrong.right(f"key {number}", "9.9.9.9")
        assert len(wrong._peers) <= 5
        assert len(wrong._proven) <= 3
    assert list(wrong._peers) == [f"1.2.3.{number}" for number in range(15, 20)]
    wrong.failed("1.2.3.15")
    wrong.failed("1.2.3.99")
    assert "1.2.3.15" in wrong._peers  # failed again a moment ago
    assert wrong.proven("key 17")
    wrong.right("key 99", "9.9.9.9")
    assert wrong.proven("key 17")
    assert not wrong.proven("key 18")


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:1.2.3.4:567", "1.2.3.4"),
        ("1.2.3.4", "1.2.3.4"),
        ("ipv6:%5B2001:db8:1:2:3::4%5D:567", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2:ffff::4]:567", "2001:db8:1:2::/64"),
        ("ipv6:[fe80::1%25eth0]:567", "fe80::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("ipv6:[::ffff:1.2.3.4]:5", "1.2.3.4"),
        ("::ffff:1.2.3.4", "1.2.3.4"),
        ("unix:/tmp/x", ""),
        ("unix:", ""),
        ("", ""),
        ("testclient", ""),
    ],
)
def test_addresses(peer: str, address: str) -> None:
    assert address_of(peer) == address


def test_processes_count_an_address_together() -> None:
    """Two that count in one ledger let in no more than one would; a question costs nothing."""
    clock = Clock()
    ledger = LocalLedger(clock)
    here, there = WrongKeys(3, clock, ledger), WrongKeys(3, clock, ledger)
    for each in (here, there, here):
        each.right("good", "1.2.3.4")  # asks, unless it was right before
        each.failed("1.2.3.4")
    for each in (here, there):
        with pytest.raises(Overloaded) as caught:
            each.failed("1.2.3.4")
        assert caught.value.retry_after_s == 20.0
        with pytest.raises(Overloaded):
            each.right("other", "1.2.3.4")
        each.right("good", "1.2.3.4")
        each.failed("1.2.3.5")
    assert (here.failures, there.failures) == (4, 3)
