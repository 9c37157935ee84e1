"""Identities: drawn once, refused where they make no sense."""

import os

import pytest

from twostroke.errors import Mismatch
from twostroke.services.identity import PROTOCOL, draw_identity, read_identity
from twostroke.v1 import worker_pb2 as pb


def test_goes_over_the_wire_and_back() -> None:
    identity = draw_identity("d0", "host")
    assert read_identity(pb.Identity.FromString(identity.message().SerializeToString())) == identity
    assert (identity.name, identity.pid, identity.host) == ("d0", os.getpid(), "host")


def test_incarnations_differ_and_are_never_0() -> None:
    drawn = {draw_identity("x", "h").incarnation for _ in range(100)}
    assert len(drawn) == 100
    assert all(0 < incarnation < 1 << 64 for incarnation in drawn)


def test_another_protocol_or_no_incarnation_is_refused() -> None:
    message = draw_identity("x", "h").message()
    message.protocol = PROTOCOL + 1
    with pytest.raises(Mismatch, match=f"{PROTOCOL} here, {PROTOCOL + 1} there"):
        read_identity(message)
    message.protocol, message.incarnation = PROTOCOL, 0
    with pytest.raises(Mismatch, match="incarnation"):
        read_identity(message)
