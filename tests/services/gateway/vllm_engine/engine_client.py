"""A router's side of the engine door, for its tests."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from twostroke.smg import vllm_engine_pb2 as pb
from twostroke.smg import vllm_engine_pb2_grpc

from ...cluster import Cluster, cluster
from ...stand_in_worker import Script, StandIn

PROMPT = [5, 6, 7]


def request(
    request_id: str = "", *, stream: bool = True, ids: Sequence[int] = PROMPT, **params: Any
) -> pb.GenerateRequest:
    """Of tokens; `params`: sampling parameters."""
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
    )


def prefill(**script: Any) -> StandIn:
    return StandIn("prefill", "p0", Script(**script))


def decode(**script: Any) -> StandIn:
    return StandIn("decode", "d0", Script(**script))


class Engine:
    """The gateway as a router sees it."""

    def __init__(self, it: Cluster) -> None:
        self.it = it
        self.stub = vllm_engine_pb2_grpc.VllmEngineStub(it.channel)

    async def all(self, wanted: pb.GenerateRequest, **options: Any) -> list[pb.GenerateResponse]:
        """All messages of a call."""
        return [message async for message in self.stub.Generate(wanted, **options)]

    async def abort(self, *request_ids: str, **options: Any) -> None:
        await self.stub.Abort(pb.AbortRequest(request_ids=request_ids), **options)


@asynccontextmanager
async def engine(model_dir: Path, *workers: StandIn, **settings: Any) -> AsyncIterator[Engine]:
    """A gateway before these workers; checks that nothing of a request is left at the end."""
    async with cluster(model_dir, *workers, **settings) as it:
        yield Engine(it)
        await it.idle()


def tokens(messages: Sequence[pb.GenerateResponse], index: int = 0) -> list[int]:
    """Of all chunks of an answer."""
    return [
        token
        for message in messages
        if message.HasField("chunk") and message.chunk.index == index
        for token in message.chunk.token_ids
    ]


def ends(messages: Sequence[pb.GenerateResponse]) -> dict[int, pb.GenerateComplete]:
    """By answer; fails where one has several, or something follows it."""
    found: dict[int, pb.GenerateComplete] = {}
    for message in messages:
        told = message.complete if message.HasField("complete") else message.chunk
        assert told.index not in found, "something follows an answer's end"
        if isinstance(told, pb.GenerateComplete):
            found[told.index] = told
    return found
