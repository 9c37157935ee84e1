"""`/v1/models`, `/health` and `/metrics`."""

import time
from collections.abc import Callable
from typing import Any

from ....errors import Unavailable
from ..figures import CONTENT_TYPE, Figures
from ..served_model import ServedModel
from .errors import nothing_here
from .exchange import Exchange
from .logprobs import to_json


class About:
    """What the gateway says of itself."""

    def __init__(self, model: ServedModel, figures: Figures, serving: Callable[[], bool]) -> None:
        """`serving`: whether requests are taken and could be served."""
        self._model = model
        self._figures = figures
        self._serving = serving
        self._created = int(time.time())

    async def models(self, exchange: Exchange) -> None:
        """A list of the one that there is."""
        await exchange.respond(200, to_json({"object": "list", "data": [self._told()]}).encode())

    async def model(self, exchange: Exchange) -> None:
        """By name; ModelNotFound."""
        name = exchange.params["model"]
        if not name:
            raise nothing_here()
        self._model.check_name(name)
        await exchange.respond(200, to_json(self._told()).encode())

    async def health(self, exchange: Exchange) -> None:
        """200 or, while nobody can decode or the gateway drains, 503."""
        if not self._serving():
            raise Unavailable("requests cannot be served now", retry_after_s=1.0)
        await exchange.respond(200, b'{"status":"ok"}')

    async def metrics(self, exchange: Exchange) -> None:
        """Prometheus' text format."""
        await exchange.respond(200, self._figures.text(), kind=CONTENT_TYPE)

    def _told(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "twostroke",
            "max_model_len": self._model.context_length,
        }
