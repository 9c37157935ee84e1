"""A request's life through a real gateway, with stand-in workers: every way in which it can end."""

import asyncio

from .cluster import cluster, text_request, token_ids
from .stand_in_worker import EOS, StandIn


async def test_a_request_goes_through_both_workers(tiny_llama_dir) -> None:
    async with cluster(tiny_llama_dir, StandIn("prefill", "p0"), StandIn("decode", "d0")) as it:
        pieces = await it.collect(text_request())
        assert token_ids(pieces) == [*range(10, 40), EOS]
        finish = pieces[-1].finish
        print(pieces[-1])
        assert (finish.prefill_worker, finish.decode_worker) == ("p0", "d0")
        await it.idle()
        assert not it.worker("p0").cancels
