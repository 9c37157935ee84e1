"""What the GPU engine is measured by: what the chip allows, what vLLM reaches, what we aim for.

One H200 (copy 4.27 TB/s, bf16 matrices 787 TFLOP/s), the shape of Llama-3.1-8B, bf16, random weights, greedy.
"""

from collections.abc import Mapping
from typing import NamedTuple

from record import Recorder

PEER = "vLLM 0.26.0"
PEER_SOURCE = "one H200 on an earlier day: torch 2.11, FA3, CUDA graphs, its defaults, prefix caching off"
MODEL = "llama-3.1-8b"


class Target(NamedTuple):
    """Milliseconds a step, or tokens a second."""

    limit: float  # bytes or FLOPs over the ceilings, operation by operation
    peer: float
    goal: float  # to be reached besides the peer


Point = tuple[int, int]  # sequences, tokens of each prompt
DECODE: Mapping[Point, Target] = {
    (1, 1024): Target(3.6, 4.98, 4.3),
    (8, 1024): Target(3.8, 5.30, 4.6),
    (32, 1024): Target(4.6, 6.27, 5.4),
    (64, 1024): Target(5.7, 7.71, 6.6),
    (128, 1024): Target(7.8, 10.88, 9.2),
    (256, 1024): Target(13.5, 18.44, 15.3),
    (32, 8192): Target(11.7, 13.33, 13.1),
}
PREFILL: Mapping[Point, Target] = {
    (1, 1024): Target(55e3, 32.2e3, 32.2e3),
    (1, 2048): Target(54e3, 39.5e3, 39.5e3),
    (1, 8192): Target(49e3, 38.4e3, 38.4e3),
    (1, 16384): Target(43e3, 33.5e3, 33.5e3),
    (16, 2048): Target(54e3, 42.4e3, 42.4e3),
}
IDLE_US = 30.0  # GPU idle between two decode steps at batch 256, median
HOST_MS = 1.0  # host time of such a step


def record_peer(recorder: Recorder, bench: str, target: Target, unit: str, point: Point) -> None:
    """The peer's line beside ours."""
    recorder.add(
        bench, target.peer, unit, peer=PEER, peer_source=PEER_SOURCE, model=MODEL, dtype="bfloat16",
        kv_dtype="bfloat16", batch=point[0], context=point[1],
    )  # fmt: skip
