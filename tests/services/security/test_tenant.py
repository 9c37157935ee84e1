"""Tenants: salts that never meet, and on whose behalf a task runs."""

import asyncio
from itertools import product

import pytest

from twostroke.errors import PermissionDenied
from twostroke.services.gateway.generation import GenerationRequest, TextInput
from twostroke.services.security.limits import Limits
from twostroke.services.security.tenant import ANYONE, Tenant, current_tenant, serve_as, serving


def test_salts_of_tenants_never_meet() -> None:
    names = ["a", "ab", "abc", "b"]
    wishes = [b"", b"b", b"bc", b"c", b"\0", Tenant("a").cache_salt(), Tenant("a").cache_salt(b"c")]
    salts = {Tenant(name).cache_salt(wish) for name, wish in product(names, wishes)}
    assert len(salts) == len(names) * len(wishes)
    assert {len(salt) for salt in salts} == {32}  # workers take 64 at most


def test_a_tenant_s_salt_does_not_depend_on_its_key_or_limits() -> None:
    assert Tenant("a", admin=True, limits=Limits(max_requests=3)).cache_salt(b"x") == Tenant("a").cache_salt(b"x")


def test_without_authentication_the_wish_is_the_salt() -> None:
    assert ANYONE.cache_salt() == b""
    assert ANYONE.cache_salt(b"wish") == b"wish"


def test_admins() -> None:
    Tenant("a", admin=True).require_admin()
    with pytest.raises(PermissionDenied, match=r"'a'.*admin"):
        Tenant("a").require_admin()


async def test_tasks_have_their_own_tenant_and_hand_it_on() -> None:
    async def inner() -> Tenant:
        return await asyncio.create_task(_current())

    async def outer(name: str) -> Tenant:
        serve_as(Tenant(name))
        await asyncio.sleep(0)
        return await inner()

    assert [tenant.name for tenant in await asyncio.gather(outer("a"), outer("b"))] == ["a", "b"]
    assert current_tenant() is ANYONE


async def _current() -> Tenant:
    return current_tenant()


def test_a_request_runs_under_the_tenant_of_its_call() -> None:
    assert GenerationRequest(TextInput("")).tenant is ANYONE
    with serving(Tenant("a")):
        assert GenerationRequest(TextInput("")).tenant == Tenant("a")
        assert GenerationRequest(TextInput(""), tenant=Tenant("b")).tenant == Tenant("b")
    assert current_tenant() is ANYONE
