"""`/tokenize` and `/detokenize`, with the fields that other servers have for them."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from ..generation import ChatInput, TextInput, TokenInput
from ..lifecycle import Lifecycle
from ..served_model import ServedModel
from ..validation import check_token_input
from .bodies import Bodies
from .chat_options import TemplateFields, check_names, read_chat
from .errors import HttpRefusal
from .exchange import Exchange
from .fields import Fields, Many
from .logprobs import to_json
from .messages import read_messages
from .tool_fields import read_wish


class TokenizeFields(TemplateFields):
    """A text or a chat."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"chat_template": ()}
    model: str = ""
    prompt: str | None = None
    messages: Any = None
    tools: list[Any] = Field(default_factory=list)
    return_token_strs: bool = False

    def source(self, model: ServedModel) -> TextInput | ChatInput:
        """What is to be tokenized. HttpRefusal."""
        if self.prompt is None:
            return read_chat(self, read_messages(self.messages), read_wish(self.tools, None, parallel=True), model)
        return TextInput(self.prompt, self.add_special_tokens is not False)


class DetokenizeFields(Fields):
    """Tokens."""

    model: str = ""
    tokens: Many[list[int]]


class Tokenize:
    """The two endpoints."""

    def __init__(self, lifecycle: Lifecycle, *, bodies: Bodies) -> None:
        self._lifecycle = lifecycle
        self._model = lifecycle.model
        self._bodies = bodies

    async def tokenize(self, exchange: Exchange) -> None:
        """The ids that a request would run."""
        fields = TokenizeFields.read(await exchange.json(self._bodies))
        if (fields.prompt is None) == (fields.messages is None):
            raise HttpRefusal("send either prompt or messages", field="prompt", code="missing_required_parameter")
        exchange.chat = fields.prompt is None
        source = fields.source(self._model)
        async with exchange.present():
            if isinstance(source, ChatInput):
                await check_names(source, self._model)
            ids = await self._lifecycle.tokenize(fields.model, source)
            texts = await self._model.token_texts(ids) if fields.return_token_strs else None
        told = {"count": len(ids), "max_model_len": self._model.context_length, "tokens": ids, "token_strs": texts}
        await exchange.respond(200, to_json(told).encode("utf-8", "replace"))

    async def detokenize(self, exchange: Exchange) -> None:
        """The text of tokens, special ones by their names."""
        fields = DetokenizeFields.read(await exchange.json(self._bodies))
        self._model.check_name(fields.model)
        exchange.renamed["input.token_ids.ids"] = "tokens"
        check_token_input(TokenInput(fields.tokens), self._model)
        async with exchange.present():
            text = await self._model.text(fields.tokens, skip_special=False)
        await exchange.respond(200, to_json({"prompt": text}).encode("utf-8", "replace"))
