"""The gRPC services for clients: which ones a gateway offers, and how they are made."""

from collections.abc import Callable

import grpc.aio

from ...oip import grpc_service_pb2, grpc_service_pb2_grpc
from ...smg import vllm_engine_pb2_grpc
from ...v1 import inference_pb2, inference_pb2_grpc
from ..settings import GatewaySettings
from .admission import Admission
from .auth import Authenticator
from .figures import Figures
from .inference import InferenceServicer
from .lifecycle import Lifecycle
from .oip.servicer import Limits, OpenInferenceServicer
from .processes.siblings import Siblings
from .vllm_engine.door import engine_servicer
from .vllm_engine.servicer import SERVICE as VLLM_ENGINE

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
OPEN_INFERENCE = grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name


def door_names(settings: GatewaySettings) -> tuple[str, ...]:
    """Full names of the services, for reflection and health."""
    names = [INFERENCE]
    if settings.open_inference:
        names.append(OPEN_INFERENCE)
    if settings.vllm_engine and not settings.engine_listen:
        names.append(VLLM_ENGINE)
    return tuple(names)


def add_doors(
    server: grpc.aio.Server,
    settings: GatewaySettings,
    lifecycle: Lifecycle,
    authenticator: Authenticator,
    serving: Callable[[], bool],
    admission: Admission,
    figures: Figures,
    siblings: Siblings,
) -> None:
    """Adds those of `door_names`. `serving`: whether requests are taken and could be served."""
    native = InferenceServicer(lifecycle, settings.keep_alive_s)
    inference_pb2_grpc.add_InferenceServicer_to_server(native, server)
    if settings.open_inference:
        limits = Limits(
            settings.max_answer_bytes, settings.slow_reader_s, settings.keep_alive_s, settings.stream_idle_s
        )
        open_inference = OpenInferenceServicer(
            lifecycle, limits, serving=serving, authenticate=authenticator.authenticate
        )
        grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(open_inference, server)
    if settings.vllm_engine and not settings.engine_listen:
        engine = engine_servicer(settings, lifecycle, admission, figures, serving, siblings.running, siblings.abort)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(engine, server)
