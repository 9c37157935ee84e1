"""The paths of the HTTP API."""

from collections.abc import Callable

from starlette.routing import Route, Router

from ..figures import Figures
from ..lifecycle import Lifecycle
from .about import About
from .bodies import Bodies
from .endpoint import Authenticate, Endpoint, Handler, no_check
from .errors import nothing_here
from .exchange import Exchange
from .generate import Generate
from .tokenize import Tokenize


def build_app(
    lifecycle: Lifecycle,
    figures: Figures,
    *,
    bodies: Bodies,
    serving: Callable[[], bool],
    authenticate: Authenticate = no_check,
    metrics: bool = True,
    keep_alive_s: float = 0,
) -> Router:
    """`serving`: for `/health`. `authenticate`: Unauthenticated, PermissionDenied.
    `metrics`: whether `/metrics` is here. `keep_alive_s`: see `Generate`."""
    generate = Generate(lifecycle, bodies=bodies, keep_alive_s=keep_alive_s)
    tokenize = Tokenize(lifecycle, bodies=bodies)
    about = About(lifecycle.model, figures, serving)

    def route(
        path: str, method: str, handler: Handler, *, check: Authenticate = authenticate, admin: bool = False
    ) -> Route:
        methods = {"GET": handler, "HEAD": handler} if method == "GET" else {method: handler}
        return Route(path, Endpoint(path, methods, authenticate=check, count=figures.responded, admin=admin))

    return Router(
        [
            route("/v1/completions", "POST", generate.complete),
            route("/v1/chat/completions", "POST", generate.chat),
            route("/v1/models", "GET", about.models),
            route("/v1/models/{model:path}", "GET", about.model),
            route("/tokenize", "POST", tokenize.tokenize),
            route("/detokenize", "POST", tokenize.detokenize),
            route("/health", "GET", about.health, check=no_check),
            *([route("/metrics", "GET", about.metrics, admin=True)] if metrics else []),
        ],
        redirect_slashes=False,
        default=Endpoint("other", {}, other=_nothing_here, authenticate=authenticate, count=figures.responded),
    )


def build_metrics_app(
    lifecycle: Lifecycle, figures: Figures, *, serving: Callable[[], bool], authenticate: Authenticate
) -> Router:
    """Of a port for `/metrics` and `/health` alone. Scrapes are not counted among the clients' requests."""
    about = About(lifecycle.model, figures, serving)

    def route(path: str, handler: Handler, check: Authenticate, *, admin: bool) -> Route:
        methods = {"GET": handler, "HEAD": handler}
        return Route(path, Endpoint(path, methods, authenticate=check, count=_uncounted, admin=admin))

    return Router(
        [
            route("/metrics", about.metrics, authenticate, admin=True),
            route("/health", about.health, no_check, admin=False),
        ],
        redirect_slashes=False,
        default=Endpoint("other", {}, other=_nothing_here, authenticate=authenticate, count=_uncounted),
    )


def _uncounted(_: str, __: int) -> None:
    """For endpoints that no figure is kept of."""


async def _nothing_here(_: Exchange) -> None:
    raise nothing_here()
