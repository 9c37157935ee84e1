"""What routers ask once: the model and the gateway, as an engine tells of them."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....smg import vllm_engine_pb2 as pb
from ..admission import Admission
from ..board import Cell
from ..fleet import Fleet
from ..router import Role
from ..served_model import ServedModel

PROTOCOL = "vllm-grpc"
FIRST_TOKEN = "first_token"
MAX_LISTED = 16  # architectures of a model
CONFIG = "config.json"
INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What routers want to know of a model's files and the gateway does not need itself."""

    folder: str
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    bos_token_id: int = 0
    pad_token_id: int = 0


def read_facts(folder: Path) -> ModelFacts:
    """Of a folder that a model was loaded from; what is missing or odd is left out."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    if not isinstance(config, dict):
        config = {}
    names = config.get("architectures")
    return ModelFacts(
        folder=str(folder),
        model_type=_text(config.get("model_type")),
        architectures=tuple(map(_text, names[:MAX_LISTED])) if isinstance(names, list) else (),
        bos_token_id=_token(config.get("bos_token_id")),
        pad_token_id=_token(config.get("pad_token_id")),
    )


def model_info(model: ServedModel, facts: ModelFacts) -> pb.GetModelInfoResponse:
    """Of the served model."""
    return pb.GetModelInfoResponse(
        model_path=facts.folder,
        is_generation=True,
        max_context_length=model.context_length,
        vocab_size=model.vocabulary_size,
        served_model_name=model.name,
        tokenizer_path=facts.folder,
        model_type=facts.model_type,
        architectures=facts.architectures,
        eos_token_ids=model.eos_token_ids,
        pad_token_id=facts.pad_token_id,
        bos_token_id=facts.bos_token_id,
        max_req_input_len=model.max_input,
    )


class ServerFacts:
    """The gateway since its start."""

    def __init__(self, fleet: Fleet, admission: Admission, serving: Callable[[], bool]) -> None:
        """`serving`: whether requests are taken and could be served."""
        self._fleet = fleet
        self._admission = admission
        self._serving = serving
        self._started = time.monotonic()
        self._received = 0.0

    def received(self) -> None:
        """A request came."""
        self._received = time.time()

    @property
    def paused(self) -> bool:
        """Whether nothing new is taken although it could be served."""
        return self._fleet.can_decode and not self._serving()

    def health(self) -> pb.HealthCheckResponse:
        """Whether requests are served, and why not."""
        if self._serving():
            return pb.HealthCheckResponse(healthy=True, message="requests can be served")
        reason = "the gateway is shutting down" if self.paused else self._fleet.unavailable().message
        return pb.HealthCheckResponse(healthy=False, message=reason)

    def info(self) -> pb.GetServerInfoResponse:
        """As of now."""
        loads = self._fleet.loads()
        decoding = [load for load in loads if load.role is not Role.PREFILL]
        return pb.GetServerInfoResponse(
            active_requests=self._admission.board.total(Cell.INSIDE),
            is_paused=self.paused,
            last_receive_timestamp=self._received,
            uptime_seconds=time.monotonic() - self._started,
            server_type=PROTOCOL,
            data_parallel_size=1,
            kv_cache_dtype=self._fleet.session(loads[0].incarnation).format.kv_dtype if loads else "",
            block_size=loads[0].page_size if loads else 0,
            max_num_seqs=min(INT32, sum(load.max_batch for load in decoding)),
            constrained_decoding_start=FIRST_TOKEN,
        )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _token(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT32 else 0
