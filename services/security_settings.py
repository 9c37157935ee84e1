"""Settings of security: those of the links between our processes, and those of a gateway's door."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from .security.limits import LEAST_URGENT, MOST_AT_ONCE, MOST_PER_MINUTE, MOST_URGENT
from .setting_kinds import Names


class ClusterSecurity(BaseSettings):
    """Between gateways, prefill and decode workers; the same for all of them."""

    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    cluster_cert: Path | None = None
    """Certificate (PEM, with its chain) that this process shows to workers and gateways; workers then take TLS only."""
    cluster_key: Path | None = None
    """Private key of `cluster_cert` (PEM, not encrypted)."""
    cluster_ca: Path | None = None
    """Authorities (PEM) by which workers and gateways know each other; who has it connects to workers over TLS."""
    cluster_client_certs: bool = True
    """A worker that listens over TLS takes only peers that show a certificate of `cluster_ca`."""
    cluster_name: str = Field("", max_length=253)
    """Name that a worker's certificate must have; empty: the host in the worker's address."""
    cluster_peers: Names = Field(default_factory=list, max_length=1024)
    """Names of which a peer's certificate must have one to be taken by a worker; none: any name will do."""


class DoorSecurity(BaseSettings):
    """Of a gateway, towards its clients."""

    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    tls_cert: Path | None = None
    """Certificate (PEM, with its chain) of the gateway; it then takes TLS only. Read again when it is replaced."""
    tls_key: Path | None = None
    """Private key of `tls_cert` (PEM, not encrypted)."""
    tls_client_ca: Path | None = None
    """Authorities (PEM) of clients' certificates; given, only clients that show one may connect."""
    tls_client_names: Names = Field(default_factory=list, max_length=1024)
    """Names of which a client's certificate must have one; none: any name will do."""
    api_keys: Path | None = None
    """File of API keys, a line each, which `twostroke keys new` prints; given, callers must show a key or a token."""
    jwt_keys: Path | None = None
    """Public keys of signed tokens: a JSON Web Key Set, or one key as PEM (RS256, ES256, EdDSA); see `api_keys`."""
    jwt_audience: str = Field("", max_length=1024)
    """Audience (`aud`) that a token must be for; needed with `jwt_keys`."""
    jwt_issuer: str = Field("", max_length=1024)
    """Issuer (`iss`) that a token must be of; needed with `jwt_keys`."""
    jwt_tenant_claim: str = Field("sub", min_length=1, max_length=128)
    """Claim of a token that names its tenant."""
    jwt_admin_scope: str = Field("twostroke:admin", max_length=128)
    """Scope (`scope` or `scp`) of tokens that may give orders to the cluster; empty: none may."""
    jwt_limits_claim: str = Field("twostroke_limits", max_length=128)
    """Claim of a token with its tenant's limits, an object; empty: none. What the file of keys says goes first."""
    wrong_keys_per_minute: int = Field(30, ge=0, le=MOST_PER_MINUTE)
    """Wrong keys and tokens of an address (IPv6: of a /64 network) a minute; more are not looked at; 0: any number."""
    tenant_requests: int = Field(0, ge=0, le=MOST_AT_ONCE)
    """Requests of one tenant at once, where its key does not say; 0: as many as `max_queue`."""
    tenant_requests_per_minute: int = Field(0, ge=0, le=MOST_PER_MINUTE)
    """Requests of one tenant a minute, where its key does not say; 0: any number."""
    tenant_input_tokens_per_minute: int = Field(0, ge=0, le=MOST_PER_MINUTE)
    """Prompt tokens of one tenant a minute, where its key does not say; 0: any number."""
    tenant_output_tokens_per_minute: int = Field(0, ge=0, le=MOST_PER_MINUTE)
    """Generated tokens of one tenant a minute, where its key does not say; 0: any number."""
    tenant_priority: int = Field(0, ge=MOST_URGENT, le=LEAST_URGENT)
    """Most urgent (lowest) `priority` that a tenant may ask for, where its key does not say."""
    open_inference: bool = True
    """Serve the Open Inference Protocol (with Triton's stream) beside the native API, on the same port."""
    vllm_engine: bool = True
    """Serve `vllm.grpc.engine.VllmEngine` there too: LLM routers take the gateway for an engine."""
    reflection: bool = True
    """Serve gRPC's reflection, by which clients learn the API's messages."""
    metrics: bool = True
    """Serve figures for Prometheus at `/metrics`."""
    max_metadata_bytes: int = Field(16_384, ge=1024, le=1 << 20)
    """Most metadata (headers) of a call, in bytes."""
    max_streams: int = Field(512, ge=1, le=1 << 20)
    """Calls at once of one connection; a client keeps further ones back."""
    max_calls: int = Field(16_384, ge=4, le=1 << 20)
    """Calls over gRPC at once, of all connections; more are refused. A quarter is left by whoever has most."""
    grpc_connections: int = Field(16_384, ge=1, le=1 << 20)
    """gRPC connections at once, of each port; one more is closed at once."""
    request_s: float = Field(60, ge=0.1, le=3600, allow_inf_nan=False)
    """A request that has not arrived so long after its beginning is given up, in seconds."""
    stream_idle_s: float = Field(600, ge=0.1, le=86_400, allow_inf_nan=False)
    """A call that takes many requests ends where none is under way and none comes for so long, in seconds."""
    connection_idle_s: float = Field(3600, ge=0, le=86_400, allow_inf_nan=False)
    """A connection without calls is closed after so long, in seconds; 0: never."""
    connection_age_s: float = Field(0, ge=0, le=864_000, allow_inf_nan=False)
    """A connection takes no new calls after so long (running ones go on), in seconds; 0: it may for ever."""
    keep_alive_s: float = Field(15, ge=0, le=3600, allow_inf_nan=False)
    """A stream that is silent for so long gets a sign of life, so that proxies keep it, in seconds; 0: none."""
