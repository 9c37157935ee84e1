"""Puts the engine door together."""

from collections.abc import Callable
from functools import partial

from ...settings import GatewaySettings
from ..admission import Admission
from ..figures import Figures
from ..lifecycle import Lifecycle
from .about import ServerFacts, read_facts
from .generate import Generate
from .kv_events import KvEvents
from .loads import loads_response
from .running import Running
from .servicer import Abort, VllmEngineServicer
from .tokenizer_files import TokenizerFiles


def engine_servicer(
    settings: GatewaySettings,
    lifecycle: Lifecycle,
    admission: Admission,
    figures: Figures,
    serving: Callable[[], bool],
    running: Running,
    abort: Abort,
) -> VllmEngineServicer:
    """For the gateway's own server. `serving`: whether requests are taken and could be served. `running`: gets this
    process' requests. `abort`: ends some, in whichever process they are."""
    model, fleet = lifecycle.model, lifecycle.fleet
    generate = Generate(
        lifecycle,
        running,
        slow_reader_s=settings.slow_reader_s,
        keep_alive_s=settings.keep_alive_s,
        max_answer_bytes=settings.max_answer_bytes,
    )
    return VllmEngineServicer(
        generate,
        abort,
        model,
        read_facts(model.folder),
        ServerFacts(fleet, admission, serving),
        partial(loads_response, fleet, figures),
        TokenizerFiles(model.folder, model.threads),
        KvEvents(fleet.blocks, slow_reader_s=settings.slow_reader_s),
    )
