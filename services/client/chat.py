"""A chat with a gateway: asks, streams the answer, keeps the conversation. No terminal: that is the command's."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from ...errors import InvalidRequest
from ...v1 import inference_pb2 as pb
from .client import Client, Measured
from .conversation import Conversation


@dataclass(frozen=True, slots=True)
class Answered:
    """How an answer went. Without `finish` it was stopped."""

    measured: Measured
    finish: pb.Finish | None
    kept: bool = True  # False: nothing had come, so that the question was forgotten too

    def summary(self) -> str:
        """The timings, in a line."""
        measured, finish = self.measured, self.finish
        if finish is None:
            ending = f"stopped after {measured.tokens} tokens"
        else:
            ending = f"{finish.usage.output_tokens} tokens"
            ending += " (length reached)" if finish.reason == pb.FINISH_REASON_LENGTH else ""
        parts = [ending]
        if measured.tokens:
            parts.append(f"first token {measured.first_token_s * 1000:.0f} ms")
        if measured.tokens > 1:
            parts.append(f"{measured.tokens_per_s:.1f} tokens/s")
        if finish is not None:
            parts.append(f"prompt {finish.usage.prompt_tokens} tokens, {finish.usage.cached_tokens} cached")
        return f"[{', '.join(parts)}]"


class Chat:
    """One conversation with the model of one gateway."""

    def __init__(
        self, client: Client, request: pb.GenerateRequest, conversation: Conversation, *, timeout_s: float | None = None
    ) -> None:
        """`request`: what every question has in common: model, sampling, stopping. `timeout_s`: of each answer."""
        self._client, self._request, self._timeout_s = client, request, timeout_s
        self.conversation = conversation

    async def open(self) -> pb.GetModelResponse:
        """Describes the model. Unavailable where no gateway answers, InvalidRequest for a model that cannot chat."""
        model = await self._client.model(self._request.model)
        if not model.has_chat_template:
            raise InvalidRequest(f"{model.model} has no chat template: use `twostroke generate --raw`", field="model")
        return model

    async def close(self) -> None:
        """Hangs up."""
        await self._client.close()

    async def ask(self, text: str, show: Callable[[str], None]) -> Answered:
        """Asks and gives each piece of the answer to `show`. Cancelling it stops the answer, and is no error.

        Raises TwostrokeError where the answer fails; what had come of it is kept in the conversation, and where nothing
        had, the question is not either.
        """
        conversation, measured, finish = self.conversation, Measured(), None
        conversation.ask(text)
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.input.chat.CopyFrom(conversation.chat())
        try:
            async with aclosing(self._client.generate(request, self._timeout_s, measured)) as pieces:
                async for piece in pieces:
                    conversation.hear(piece.text)
                    show(piece.text)
                    finish = piece.finish if piece.HasField("finish") else finish
        except asyncio.CancelledError:
            finish = None
        finally:
            kept = conversation.close()
        return Answered(measured, finish, kept)
