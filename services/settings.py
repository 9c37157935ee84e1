"""Every setting of every process: one validated schema.

`services/configure.py` fills it from flags, `TWOSTROKE_*` variables and a TOML file; `services/options.py` makes the
command line's options of it and `services/describe.py` the texts. Built directly (`GatewaySettings(listen=...)`) it
reads nothing but its arguments.
"""

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from ..engine.config import DType, EngineOptions, LoadFormat, Reserve
from .security.tenant import NAME as TENANT_NAME
from .security_settings import ClusterSecurity, DoorSecurity
from .setting_kinds import Takes as Takes
from .setting_kinds import parse_list as parse_list

ENV_PREFIX = "TWOSTROKE_"
DNS_PREFIX = "dns:"
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)


def parse_bytes(value: object) -> object:
    """'1GiB', '512MB', '1.5 GiB' or a plain number, as bytes; anything else is left for the schema to refuse."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("not a size")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def parse_limit(value: object) -> object:
    """A share of something ('0.9', 1) or an amount of it ('60GiB', 64424509440); what is neither is left or refused.

    A number from 1 to 1 MiB is refused: whoever says 90 means 0.9.
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = parse_bytes(value)
    if isinstance(value, bool) or (isinstance(value, (int, float)) and 1 < value < 1 << 20):
        raise ValueError("neither a share nor a size")
    return value


def split_address(address: str) -> tuple[str, int]:
    """('host', port) of 'host:port', '[::1]:port' or ':port' (every interface); ValueError otherwise."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError("not an address")
    bracketed = host.startswith("[") and host.endswith("]")
    if (":" in host and not bracketed) or re.search(r"[\s/,]", host):
        raise ValueError("not an address")
    return host or "[::]", int(port)


def _address(value: str) -> str:
    if value:
        split_address(value)
    return value


def _switch(value: object) -> object:
    return "" if value == "off" else value


def _place(value: str) -> str:
    if value:
        split_address(value.removeprefix(DNS_PREFIX))
    return value


def _digits(value: object) -> object:
    return int(value) if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() else value


Size = Annotated[int, BeforeValidator(parse_bytes), Takes("a size")]
MaybeSize = Annotated[int | None, BeforeValidator(parse_bytes), Takes("a size")]
Limit = Annotated[float, BeforeValidator(parse_limit), Takes("a share over 0, up to 1, or a size such as 60GiB")]
Address = Annotated[str, AfterValidator(_address), Takes("an address, host:port")]
HttpAddress = Annotated[str, BeforeValidator(_switch), AfterValidator(_address), Takes("an address, host:port, or off")]
Place = Annotated[str, AfterValidator(_place)]
Places = Annotated[list[Place], BeforeValidator(parse_list), NoDecode, Takes("addresses, host:port,host:port")]
Gpu = Annotated[str, Field(pattern=r"^cuda:\d{1,2}$")]
Gpus = Annotated[list[Gpu], BeforeValidator(parse_list), NoDecode, Takes("GPUs, cuda:N,cuda:N")]
PageSize = Annotated[Literal[16, 32, 64, 128] | None, BeforeValidator(_digits)]
Seconds = Annotated[float, Field(ge=0.1, le=86_400, allow_inf_nan=False)]
LogLevel = Literal["debug", "info", "warning", "error"]
_TOKENS = 1 << 24  # no model's context comes near


class Settings(ClusterSecurity):
    """What every process shares: the keys at the top of the file."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    model: str = Field("smollm2-135m", min_length=1, max_length=4096)
    """Model to serve: `smollm2-135m` (the embedded default), a local directory, or a hub id."""
    models_dir: Path | None = None
    """Folder for downloaded and converted models; default: `~/.cache/twostroke/models`, and the hub's own cache."""
    name: Annotated[str, Takes("up to 64 letters, digits and . _ -")] = Field("", pattern=r"^[A-Za-z0-9_.\-]{0,64}$")
    """Name for people, in logs and answers; empty: role and process id."""
    drain_s: Seconds = 30
    """After SIGTERM: how long running requests may still take, in seconds."""
    silence_s: Seconds = 10
    """A peer that says nothing for so long is taken for dead, in seconds."""
    log_level: LogLevel = "info"
    """Least severe log lines that are written (to stderr)."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments only: whoever wants variables and files says so (`services/configure.py`)."""
        return (init_settings,)


class GatewaySettings(DoorSecurity, Settings):
    """The gateway: `[gateway]` in the file."""

    listen: Address = Field("127.0.0.1:50051", min_length=1)
    """Address to serve on, host:port; port 0: a free one."""
    http_listen: HttpAddress = "127.0.0.1:8000"
    """Address of the OpenAI API over HTTP; port 0: a free one, as is the default where `listen` has it; `off`: none."""
    processes: int = Field(1, ge=1, le=32)
    """Gateway processes that share these addresses and all limits; of use where one core is too little."""
    http_connections: int = Field(16_384, ge=1, le=1 << 20)
    """HTTP connections at once; one more is closed at once."""
    admin_listen: Address = ""
    """Where orders to the cluster and reflection are served instead; without TLS if only this machine reaches it."""
    engine_listen: Address = ""
    """Where the engine protocol is served instead, without keys, as `engine_tenant`; TLS as with `admin_listen`."""
    engine_tenant: Annotated[str, Takes("a tenant's name")] = Field("router", pattern=f"^{TENANT_NAME}$")
    """Tenant of what comes by `engine_listen`, with the limits that the file of keys says for it."""
    metrics_listen: Address = ""
    """Where `/metrics` is served instead of beside the HTTP API; without TLS if only this machine reaches it."""
    workers: Places = Field(default_factory=list, max_length=1024)
    """Workers to connect to, host:port each, separated by commas; a name (or `dns:name:port`) may stand for several."""
    max_queue: int = Field(1024, ge=1, le=1_000_000)
    """Requests admitted at once; more are refused with RESOURCE_EXHAUSTED."""
    max_queue_tokens: int = Field(0, ge=0, le=1 << 40)
    """Tokens still to be computed for those admitted; 0: four times what fits into the decode workers' KV pools."""
    max_input: int = Field(0, ge=0, le=_TOKENS)
    """Most prompt tokens of a request; 0: the model's context."""
    max_output: int = Field(0, ge=0, le=_TOKENS)
    """Most output tokens of a request; 0: the model's context."""
    max_message_bytes: Size = Field(4 << 20, ge=1 << 16, le=1 << 26)
    """Largest request, a message or an HTTP body, in bytes; reading one may hold other streams up for 10 ms a MiB."""
    arriving_bytes: Size = Field(1 << 30, ge=1 << 16, le=1 << 40)
    """Memory for requests on their way, each counted as `max_message_bytes`; while it is taken the slowest give way."""
    max_answer_bytes: Size = Field(16 << 20, ge=1 << 16, le=1 << 30)
    """Largest message of an answer over gRPC, in bytes; clients of their own accord take 4 MiB."""
    stream_buffer_bytes: Size = Field(4 << 20, ge=1 << 16, le=1 << 30)
    """Memory for what a client that reads slowly has not taken of its answer, in bytes; more ends its stream."""
    tool_parser: Literal["auto", "none", "hermes", "llama", "mistral", "phi4", "pythonic"] = "auto"
    """The form in which the model writes calls of tools; `auto`: what its chat template tells; `none`: no tools."""
    slow_reader_s: Seconds = 30
    """A client whose buffer stays full for so long loses its stream, in seconds."""
    max_attempts: int = Field(3, ge=1, le=100)
    """Attempts of a request in all: one that loses a worker is replayed on others; 1: never."""
    replay_wait_s: Seconds = 30
    """A request that lost its worker waits so long for another one, in seconds."""
    routing: Literal["prefix", "load", "random"] = "prefix"
    """Workers are chosen by cached prefix and load, by load alone, or at random (to compare with)."""
    disaggregate: Literal["auto", "always"] = "auto"
    """Prompts go to a prefill worker where that costs less than on the decode worker (measured), or wherever one is."""
    local_prefill_tokens: int = Field(0, ge=0, le=_TOKENS)
    """A decode worker that has at most so many prompt tokens to compute does that itself, whatever was measured."""

    @property
    def http_place(self) -> str:
        """Where to serve HTTP; empty: nowhere. A second stack on a machine, told to take a free port, takes two."""
        if "http_listen" not in self.model_fields_set and split_address(self.listen)[1] == 0:
            return f"{split_address(self.http_listen)[0]}:0"
        return self.http_listen


class WorkerSettings(Settings):
    """A worker: `[worker]` in the file. The engine's options stand here under their own names."""

    role: Literal["prefill", "decode", "both"]
    """What the worker does; the command says it."""
    listen: Address = Field("127.0.0.1:0", min_length=1)
    """Address to serve on, host:port; port 0: a free one."""
    advertise: Address = ""
    """Address at which other workers reach it; empty: the one it listens on."""
    dtype: DType = "bfloat16"
    """dtype of weights, activations and KV."""
    device: Annotated[str, Takes("cpu, cuda or cuda:N")] = Field("cpu", pattern=r"^(cpu|cuda(:\d{1,2})?)$")
    """Where the model runs: `cpu`, `cuda` or `cuda:N`."""
    page_size: PageSize = None
    """Tokens a KV page; equal on all workers. By device: 16 on a CPU, 64 on a GPU."""
    kv_memory: MaybeSize = Field(None, ge=1 << 20, le=1 << 44)
    """Size of the KV pool, in bytes. By device: 1GiB on a CPU; on a GPU, what `gpu_memory` leaves."""
    gpu_memory: Limit = Field(0.9, gt=0, le=1 << 44, allow_inf_nan=False)
    """Most memory of a GPU that the worker takes, everything counted in: a share of all that it has, or bytes."""
    load_format: LoadFormat = "auto"
    """Weights: those of the model (`auto`), or random ones for its `config.json` (`dummy`), to measure with."""
    batch_invariant: bool = False
    """On a GPU: the same tokens whatever else runs, however a prompt is chunked, whatever was cached; slower."""
    cuda_graphs: bool = True
    """On a GPU: decode steps are captured once and replayed."""
    max_batch: int | None = Field(None, ge=1, le=4096)
    """Sequences that run at once. By device: 64 on a CPU, 256 on a GPU."""
    max_input: int = Field(0, ge=0, le=_TOKENS)
    """Most prompt tokens of a sequence; 0: the model's context."""
    max_output: int = Field(0, ge=0, le=_TOKENS)
    """Most output tokens of a sequence; 0: the model's context."""
    token_budget: int | None = Field(None, ge=16, le=1 << 20)
    """Tokens computed in one step, decoding ones counted in. By device: 512 on a CPU, 8448 on a GPU."""
    prompt_batch: int | None = Field(None, ge=1, le=1 << 20)
    """Where none decodes, prompts join a step while it has fewer tokens. By device: 1048576 on a CPU, 2048 on a GPU."""
    decode_prefill_budget: int = Field(128, ge=1, le=1 << 20)
    """Of these, prompt tokens that a decode worker computes."""
    reserve: Reserve = "expected"
    """Pages set aside beyond a sequence's prompt: none (`prompt`), its expected output's, or its longest output's."""
    watermark: float = Field(0.01, ge=0, le=0.5, allow_inf_nan=False)
    """Share of the pool that admission keeps free."""
    prefix_cache: bool = True
    """Keep the KV of finished prompts for requests that begin alike."""
    unticketed_share: float = Field(0.5, gt=0, le=1, allow_inf_nan=False)
    """Most of a prefill worker's pool that prompts may hold before a decode worker reserved pages for them."""
    threads: int = Field(0, ge=0, le=1024)
    """Compute threads; 0: torch's choice, or with `up` the cores divided by the workers."""
    shm_dir: Path = Path("/dev/shm")
    """Folder of the KV pool's mapped file; workers of one host share it."""
    transport: Literal["auto", "shm", "cuda_ipc", "nixl"] = "auto"
    """By which KV goes to decode workers; `auto`: the fastest that both have, `nixl` (an extra) between hosts."""
    transport_gb_per_s: float | None = Field(None, gt=0, le=10_000, allow_inf_nan=False)
    """Least GB/s of a new pair, measured, if pages are large. By device: `shm` 0.2, `cuda_ipc` 10; over `nixl` 0.05."""
    allow_slow_transport: bool = False
    """A pair that is slower than it should be is used all the same; otherwise it is an error."""
    ticket_valid_s: Seconds = 60
    """How long a decode worker waits for a prompt's KV, in seconds."""
    session_buffer_bytes: Size = Field(4 << 20, ge=1 << 16, le=1 << 30)
    """Bytes buffered for a gateway that reads slowly; more ends its session."""

    def engine_options(self) -> EngineOptions:
        """The engine's share of these settings; what was left to the device is filled in."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(EngineOptions)}
        values |= {name: 0 for name, value in values.items() if value is None}
        return EngineOptions(**values)


class UpSettings(Settings):
    """The supervisor: `[up]` in the file. Its gateway and workers take theirs from `[gateway]` and `[worker]`."""

    prefill: int = Field(1, ge=0, le=64)
    """Prefill workers to run."""
    decode: int = Field(1, ge=0, le=64)
    """Decode workers to run."""
    both: int = Field(0, ge=0, le=64)
    """Workers that do both, to run."""
    devices: Gpus = Field(default_factory=list, max_length=192)
    """GPUs over which the workers are spread, in the order prefill, decode, both; none: `device`, as `cuda` all."""
    ready_s: Seconds = 600
    """How long a process may take until it is ready (it may have to load a large model), in seconds."""
