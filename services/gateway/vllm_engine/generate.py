"""Runs a router's request: it ends with its last token, at its deadline, with its client, or by Abort."""

import asyncio
import secrets
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

import grpc.aio

from ....smg import vllm_engine_pb2 as pb
from ...security.tenant import current_tenant
from ..generation import GenerationRequest, Piece, TextInput, TokenInput
from ..inference import REQUEST_ID_KEY, TRACEPARENT_KEY, metadata, time_left, writer
from ..keep_alive import KeepAlive
from ..lifecycle import Lifecycle
from ..validation import check_request_id
from .fields import check_supported, read_answers, read_input, read_sampling, read_stopping
from .names import renaming
from .outlet import Outlet
from .reply import ABORT, ERROR, Reply, StreamReply, Wanted, WholeReply
from .running import Aborted, Running

LAST_WORDS_S = 1.0  # for the ends of answers to leave before the status of a call that fails

Context: TypeAlias = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
Out: TypeAlias = Outlet[pb.GenerateResponse]


class Generate:
    """The RPC of that name."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        running: Running,
        *,
        slow_reader_s: float,
        keep_alive_s: float,
        max_answer_bytes: int,
    ) -> None:
        """`slow_reader_s`: a client that does not read for so long loses its call. `keep_alive_s`: a stream that is
        silent for so long gets a chunk without tokens; 0: none. `max_answer_bytes`: of an answer as a whole."""
        self._lifecycle = lifecycle
        self._running = running
        self._slow_reader_s = slow_reader_s
        self._keep_alive_s = keep_alive_s
        self._max_answer_bytes = max_answer_bytes

    async def run(self, request: pb.GenerateRequest, context: Context) -> None:
        """In the call's task, which gRPC cancels when the client cancels or is gone."""
        with renaming(tokenized=request.HasField("tokenized")):
            check_supported(request)
            check_request_id(request.request_id)
            plain = _read(request, request.request_id or secrets.token_hex(8), context)
            with self._running.enter(current_tenant(), plain.request_id) as ending:
                context.set_trailing_metadata(((REQUEST_ID_KEY, plain.request_id),))
                wanted = Wanted(request.tokenized.input_ids, request.sampling_params)
                reply = self._reply(wanted, stream=request.stream)
                quiet_s = self._keep_alive_s if request.stream else 0
                async with KeepAlive(writer(context), reply.sign, quiet_s) as stream, Outlet(stream.write) as out:
                    try:
                        async with ending.watching():
                            await self._answer(plain, wanted, reply, out)
                    except Aborted:
                        rest = reply.rest(ABORT)
                    except Exception:
                        if out.begun:  # not everybody sees a call's status
                            with suppress(Exception):
                                await out.end(reply.rest(ERROR), LAST_WORDS_S)
                        raise
                    else:
                        rest = reply.rest(ERROR)
                    await out.end(rest, self._slow_reader_s)

    def _reply(self, wanted: Wanted, *, stream: bool) -> Reply:
        return StreamReply(wanted) if stream else WholeReply(wanted, self._max_answer_bytes)

    async def _answer(self, plain: GenerationRequest, wanted: Wanted, reply: Reply, out: Out) -> None:
        if isinstance(plain.input, TextInput):  # each message tells how long the prompt is
            wanted.prompt_ids = await self._lifecycle.tokenize("", plain.input)
            plain = replace(plain, input=TokenInput(wanted.prompt_ids))
        threads = self._lifecycle.model.threads

        async def send(piece: Piece) -> None:
            scores = None
            if piece.prompt_logprobs is not None:  # there may be very many
                loop = asyncio.get_running_loop()
                scores = await loop.run_in_executor(threads, wanted.input_logprobs, piece.prompt_logprobs)
            await out.put(reply.messages(piece, scores))
            reply.sent(piece)

        await self._lifecycle.generate(plain, send)


def _read(request: pb.GenerateRequest, request_id: str, context: Context) -> GenerationRequest:
    params = request.sampling_params
    return GenerationRequest(
        input=read_input(request),
        sampling=read_sampling(params),
        stopping=read_stopping(params),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        n=read_answers(params),
        skip_special_tokens=params.skip_special_tokens,
        request_id=request_id,
        timeout_s=time_left(context.time_remaining()),
        traceparent=metadata(context, TRACEPARENT_KEY),
    )
