"""What an engine's memory goes to: planned before anything is allocated, and never exceeded. No torch.

A GPU's limit is `gpu_memory`; the KV pool takes what weights, buffers and graphs leave of it. A CPU's pool is
`kv_memory`, and the rest is told, not bounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ConfigError
from . import footprint
from .config import EngineOptions
from .memory import KVPlan, column_bytes, lay_out, pages_of, plan_kv
from .model_config import ModelConfig

GIB = 1 << 30
LENGTHS = (1024, 4096, 16384)  # tokens; the table says how many sequences of each fit


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes."""

    device: str
    device_memory: int  # all that the device has; 0: not known
    limit: int  # most that the process takes; 0: not bounded
    weights: int
    rotation: int  # tables of cosines and sines
    workspace: int  # buffers of a step
    graphs: int
    graph_sizes: tuple[int, ...]  # batch sizes captured
    context: int  # what the device's driver and libraries take
    kv: KVPlan
    lengths: tuple[int, ...]  # tokens: those of LENGTHS that are within the model's context, and the context
    measured: Mapping[str, int] = field(default_factory=dict)  # by a part's name: what it turned out to take

    @property
    def parts(self) -> dict[str, int]:
        """What is planned, by name."""
        return {
            "weights": self.weights,
            "rotation": self.rotation,
            "workspace": self.workspace,
            "graphs": self.graphs,
            "context": self.context,
            "kv": self.kv.nbytes,
        }

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    def with_measured(self, **measured: int) -> "MemoryPlan":
        """The same plan with what some parts took in the end. ValueError for a part that is not planned."""
        unknown = measured.keys() - self.parts.keys()
        if unknown:
            raise ValueError(f"no part of the plan: {', '.join(sorted(unknown))}")
        return replace(self, measured={**self.measured, **measured})

    def exceeded(self) -> dict[str, int]:
        """Parts that took more than was planned, and by how many bytes."""
        parts = self.parts
        return {name: taken - parts[name] for name, taken in self.measured.items() if taken > parts[name]}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "device": self.device,
            "device_memory": self.device_memory,
            "limit": self.limit,
            "bytes": {**self.parts, "total": self.total},
            "measured": dict(self.measured),
            "graph_sizes": list(self.graph_sizes),
            "kv": {
                "dtype": self.kv.dtype,
                "token_bytes": self.kv.token_bytes,
                "page_size": self.kv.page_size,
                "page_bytes": self.kv.page_bytes,
                "pages": self.kv.usable,
                "tokens": self.kv.tokens,
            },
            "sequences": {str(length): self.kv.fits(length) for length in self.lengths},
        }

    def lines(self) -> list[str]:
        """A table for people, a line each."""
        names = {
            "weights": "weights",
            "rotation": "rotation tables",
            "workspace": "step buffers",
            "graphs": f"graphs of {len(self.graph_sizes)} batch sizes",
            "context": "CUDA context",
            "kv": f"KV pool, {self.kv.dtype}",
        }
        rows = [(names[name], size, self.measured.get(name)) for name, size in self.parts.items() if size]
        rows.append(("in all", self.total, sum(self.measured.values()) if len(self.measured) == len(names) else None))
        if self.limit:
            rows.append((f"limit, of {gib(self.device_memory)} GiB", self.limit, None))
        head = f"{f'memory of {self.device}, GiB':<28}{'planned':>10}" + ("  measured" if self.measured else "")
        table = [head, *(f"{name:<28}{gib(size):>10}" + _measured(taken) for name, size, taken in rows)]
        counts = ", ".join(f"{self.kv.fits(length):,} of {length:,}" for length in self.lengths)
        return [
            *table,
            f"KV: {self.kv.token_bytes:,} bytes a token; {self.kv.usable:,} pages of {self.kv.page_size} tokens hold "
            f"{self.kv.tokens:,} tokens",
            f"sequences that fit, by tokens: {counts}",
        ]


def plan_memory(config: ModelConfig, options: EngineOptions, *, device_memory: int = 0) -> MemoryPlan:
    """Divides the device's memory (`device_memory` bytes in all; needed for a GPU) by what the options say.

    Raises ConfigError (gpu_memory or kv_memory) with the breakdown and the remedy where no sequence of the longest
    length that is served would fit.
    """
    on_cpu = options.device_type == "cpu"
    plan = MemoryPlan(
        device=options.device,
        device_memory=device_memory,
        limit=0 if on_cpu else memory_limit(options.gpu_memory, device_memory),
        weights=footprint.weight_bytes(config, options),
        rotation=footprint.rotation_bytes(config, options),
        workspace=footprint.workspace_bytes(config, options),
        graphs=footprint.graph_bytes(options),
        graph_sizes=footprint.graph_sizes(options),
        context=0 if on_cpu else footprint.CONTEXT_BYTES,
        kv=lay_out(config, options, 0),
        lengths=(*(n for n in LENGTHS if n < config.context_length), config.context_length),
    )
    if on_cpu:
        return replace(plan, kv=plan_kv(config, options))
    return replace(plan, kv=_remaining(config, options, plan))


def memory_limit(gpu_memory: float, device_memory: int) -> int:
    """Bytes of `gpu_memory`: a share of the device's memory up to 1, else bytes. ConfigError where it has not so much.

    Never above what the device has: 1 is all of it.
    """
    if device_memory <= 0:
        raise ConfigError("the memory of the device is not known", field="device_memory")
    limit = int(gpu_memory * device_memory) if gpu_memory <= 1 else int(gpu_memory)
    if limit > device_memory:
        raise ConfigError(
            f"gpu_memory: got {gib(limit)} GiB, the device has {gib(device_memory)} GiB", field="gpu_memory"
        )
    return limit


def longest(config: ModelConfig, options: EngineOptions) -> int:
    """Tokens of the longest sequence that the options let in."""
    if options.max_input and options.max_output:
        return min(config.context_length, options.max_input + options.max_output)
    return config.context_length


def gib(count: int) -> str:
    """150120554496 as '139.81'."""
    return f"{count / GIB:.2f}"


def _measured(taken: int | None) -> str:
    return "" if taken is None else f"{gib(taken):>10}"


def _remaining(config: ModelConfig, options: EngineOptions, plan: MemoryPlan) -> KVPlan:
    """The pool in what the other parts leave (`plan` has no pages yet); where `kv_memory` says a size, that one."""
    left, column = plan.limit - plan.total, column_bytes(config, options)
    if options.kv_memory:
        pages = plan_kv(config, options).pages
        wanted = "kv_memory asks for"
    else:
        tokens = longest(config, options)
        pages = pages_of(tokens, options.page_size)
        wanted = f"one sequence of {tokens} tokens takes"
    if pages * column <= left:
        return lay_out(config, options, pages if options.kv_memory else left // column)
    enough = plan.total + pages * column
    taken = ", ".join(f"{name} {gib(size)}" for name, size in plan.parts.items() if size)
    raise ConfigError(
        f"gpu_memory: the limit is {gib(plan.limit)} GiB of {gib(plan.device_memory)}; {taken} leave "
        f"{gib(max(0, left))} for KV, but {wanted} {gib(pages * column)}. "
        + (f"Raise it to {gib(enough)} GiB or more, lower" if enough <= plan.device_memory else "Lower")
        + " --token-budget or --max-batch, or "
        + ("lower --kv-memory" if options.kv_memory else "bound sequences by --max-input and --max-output"),
        field="gpu_memory",
    )
