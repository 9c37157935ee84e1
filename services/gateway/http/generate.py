"""Runs completions and chats: fields into the gateway's requests, its pieces into replies."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from ..generation import ChatInput, GenerationRequest, Piece, Send, TextInput, TokenInput
from ..lifecycle import Lifecycle, together
from .bodies import Bodies
from .chat_fields import ChatFields
from .chat_options import check_names, read_chat
from .chat_reply import ChatReply
from .completion_fields import CompletionFields, read_prompts
from .completion_reply import CompletionReply, Prompt
from .exchange import Exchange
from .infill import around_gap
from .logprobs import TokenNames
from .messages import read_messages
from .reply import DONE, Reply
from .tool_use import constrain, plan_tools

Source: TypeAlias = TextInput | TokenInput | ChatInput
_TOOL_NAMES = {"sampling.constraint.grammar": "tools"}  # of a grammar that was made of them


class Generate:
    """The two endpoints."""

    def __init__(self, lifecycle: Lifecycle, *, bodies: Bodies, keep_alive_s: float) -> None:
        """`keep_alive_s`: see `Exchange.present`."""
        self._lifecycle = lifecycle
        self._keep_alive_s = keep_alive_s
        self._model = lifecycle.model
        self._bodies = bodies

    async def complete(self, exchange: Exchange) -> None:
        """`/v1/completions`."""
        fields = CompletionFields.read(await exchange.json(self._bodies))
        exchange.renamed.update(fields.constraint_names())
        fields.check()
        sources = read_prompts(fields.prompt, fields.n, self._model.max_input, special=fields.add_special_tokens)
        sources = around_gap(sources, fields.suffix, self._model)
        scores = fields.prompt_logprobs if not fields.echo or fields.logprobs is None else fields.logprobs
        request = GenerationRequest(
            input=None,
            model=fields.model,
            sampling=fields.sampling(),
            stopping=fields.stopping(1 if fields.prompt_only else fields.max_tokens),
            skip_special_tokens=fields.skip_special_tokens,
            logprobs=fields.logprobs,
            prompt_logprobs=scores,
            n=fields.n,
            traceparent=exchange.header(b"traceparent"),
            priority=fields.priority,
            cache_salt=fields.cache_salt.encode(),
        )
        names = self._names(fields)
        wants_ids = fields.counted or (fields.echo and fields.logprobs is not None)
        async with exchange.present(quiet_s=self._keep_alive_s if fields.stream else 0):
            prompts = [await self._prompt(fields, source, ids=wants_ids) for source in sources]
            if wants_ids:
                sources = [TokenInput(prompt.ids) for prompt in prompts]
            reply = CompletionReply(exchange.request_id, self._model.name, fields, names, prompts)
            await self._run(exchange, request, sources, reply, stream=fields.stream)
        await self._end(exchange, reply, stream=fields.stream, heavy=scores is not None)

    async def chat(self, exchange: Exchange) -> None:
        """`/v1/chat/completions`."""
        exchange.chat = True
        fields = ChatFields.read(await exchange.json(self._bodies))
        if fields.max_completion_tokens is not None:
            exchange.renamed["stopping.max_tokens"] = "max_completion_tokens"
        exchange.renamed.update(fields.constraint_names())
        fields.check()
        chat = read_chat(fields, read_messages(fields.messages), wish := fields.wish(), self._model)
        tools = plan_tools(wish, self._model)
        sampling = fields.sampling()
        if tools is not None:
            sampling = constrain(sampling, tools, self._model)
            exchange.renamed = {**_TOOL_NAMES, **exchange.renamed}
        request = GenerationRequest(
            input=None,
            model=fields.model,
            sampling=sampling,
            stopping=fields.stopping(fields.limit),
            skip_special_tokens=fields.skip_special_tokens,
            shown_tokens=tools.format.tokens if tools is not None else (),
            logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
            prompt_logprobs=fields.prompt_logprobs,
            n=fields.n,
            traceparent=exchange.header(b"traceparent"),
            priority=fields.priority,
            cache_salt=fields.cache_salt.encode(),
        )
        names = self._names(fields)
        async with exchange.present(quiet_s=self._keep_alive_s if fields.stream else 0):
            await check_names(chat, self._model)
            ids: list[int] = []
            source: Source = chat
            if fields.counted:
                ids = fields.truncated(await self._lifecycle.tokenize(fields.model, chat), self._model.max_input)
                source = TokenInput(ids)
            reply = ChatReply(exchange.request_id, self._model.name, fields, names, ids, tools)
            await self._run(exchange, request, [source], reply, stream=fields.stream)
        await self._end(exchange, reply, stream=fields.stream, heavy=fields.prompt_logprobs is not None)

    async def _prompt(self, fields: CompletionFields, source: Source, *, ids: bool) -> Prompt:
        """What the reply repeats of it."""
        text = source.text if isinstance(source, TextInput) and fields.echo else ""
        if not ids and not (fields.echo and isinstance(source, TokenInput)):
            return Prompt(text)
        most = self._model.max_input
        if isinstance(source, TokenInput):
            source = TokenInput(fields.truncated(source.ids, most))
        whole = await self._lifecycle.tokenize(fields.model, source)
        tokens = fields.truncated(whole, most)
        if fields.echo and (isinstance(source, TokenInput) or len(tokens) < len(whole)):
            text = await self._model.text(tokens, skip_special=fields.skip_special_tokens)
        return Prompt(text, tokens)

    def _names(self, fields: CompletionFields | ChatFields) -> TokenNames:
        return TokenNames(
            self._model, as_ids=fields.return_tokens_as_token_ids, skip_special=fields.skip_special_tokens
        )

    async def _run(
        self, exchange: Exchange, request: GenerationRequest, sources: Sequence[Source], reply: Reply, *, stream: bool
    ) -> None:
        """All prompts at once. The first failure ends them all."""
        deadline = exchange.deadline()
        left = None if deadline is None else deadline - time.monotonic()
        request = replace(request, timeout_s=left)
        several = len(sources) > 1
        await together(
            [
                self._lifecycle.generate(
                    replace(
                        request,
                        input=source,
                        request_id=f"{exchange.request_id}-{index}"[-128:] if several else exchange.request_id,
                    ),
                    self._sender(exchange, reply, index) if stream else partial(_take, reply, index),
                )
                for index, source in enumerate(sources)
            ]
        )

    def _sender(self, exchange: Exchange, reply: Reply, prompt: int) -> Send:
        async def send(piece: Piece) -> None:
            if piece.prompt_logprobs is not None:  # there may be very many
                loop = asyncio.get_running_loop()
                events = await loop.run_in_executor(self._model.threads, reply.events, prompt, piece)
            else:
                events = reply.events(prompt, piece)
            if events:
                await exchange.write(events)

        return send

    async def _end(self, exchange: Exchange, reply: Reply, *, stream: bool, heavy: bool) -> None:
        if stream:
            await exchange.write(reply.usage_event() + DONE)
            await exchange.end()
            return
        if heavy:
            body = await asyncio.get_running_loop().run_in_executor(self._model.threads, reply.whole)
        else:
            body = reply.whole()
        await exchange.respond(200, body)


async def _take(reply: Reply, prompt: int, piece: Piece) -> None:
    reply.take(prompt, piece)
