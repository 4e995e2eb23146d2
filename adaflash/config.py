# SPDX-License-Identifier: Apache-2.0
"""Configuration of an engine and of a server: frozen, validated once, the only reader of the environment."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from adaflash.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
VerifyPolicyName = Literal["auto", "off", "fixed", "confidence", "length_head", "goodput"]
SamplingCoupling = Literal["gumbel", "rejection"]
Supervision = Literal["captured", "recompute"]

MIN_TRAJECTORY_BYTES = 8 << 20  # two segments of the spool

ENV_PREFIX = "ADAFLASH_"
_CACHE_DIR = "CACHE_DIR"
# What Kubernetes sets in every pod beside a Service, and `<SERVICE>_PORT=tcp://...`.
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")


def _require(condition: bool, field: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{field}={value!r} is invalid: must be {allowed}")


def _require_choice(field: str, value: object, choices: Iterable[str]) -> None:
    allowed = list(choices)
    _require(value in allowed, field, value, "one of " + ", ".join(allowed))


def _require_min(field: str, value: float | None, minimum: float) -> None:
    if value is not None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        _require(is_number and value >= minimum, field, value, f">= {minimum}")


def _require_int(field: str, value: object, minimum: int) -> None:
    if value is not None:
        is_int = isinstance(value, int) and not isinstance(value, bool)
        _require(is_int and value >= minimum, field, value, f"an integer >= {minimum}")  # type: ignore[operator]


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ` (did you mean X?)` for the known name nearest to `name`, or an empty string; `prefix` goes before X."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {prefix + nearest[0]!r}?)" if nearest else ""


@dataclass(frozen=True)
class EngineConfig:
    """Everything that decides what the engine loads, how much memory it takes, and how it speculates.

    Attributes:
        model: Directory of the target in Hugging Face layout; None serves the embedded demo model.
        draft: Directory of a DFlash drafter; None means no drafter (the demo model brings its own).
        tokenizer: Directory of the tokenizer when it is not the target's.
        device: `auto` (npu, else cuda, else cpu) or the name of an installed backend.
        dtype: Computation dtype; `auto` takes the checkpoint's, except on cpu, which computes in float32.
        seed: Seeds requests that bring none.
        max_model_len: Longest prompt + output in tokens; None takes the target's own limit.
        max_num_seqs: Most sequences in one step; a request with n samples is n sequences.
        max_num_batched_tokens: Most tokens in one target forward, drafts included.
        block_size: Tokens per KV block; None takes the backend's preferred size.
        num_kv_blocks: Size of the KV pool in blocks; None derives it from `kv_cache_memory_bytes`.
        kv_cache_memory_bytes: Memory for the KV pool; None takes a share of what the device has free.
        gpu_memory_utilization: Share of device memory the engine may use when nothing explicit is given.
        enable_prefix_caching: Reuse KV of equal prompt prefixes.
        verify_policy: How many drafts each request verifies; `auto` is `goodput` with a drafter, else `off`.
        num_speculative_tokens: Upper bound of drafts to verify; None is the drafter's block size - 1.
        confidence_threshold: `confidence` keeps the prefix whose cumulative confidence is at least this.
        length_head_rate: `length_head` multiplies its prediction by this before rounding (1.0 serving, 1.3 paper).
        length_head_min: Smallest candidate length (anchor included) of `length_head`.
        sampling_coupling: `gumbel` makes sampled output independent of the drafter; `rejection` only its distribution.
        strict_ops: Make a fallback to a reference op an error.
        enforce_eager: Launch kernels one by one where forwards would run as captured graphs.
        num_threads: CPU threads for the model's math; None leaves torch's default.
    """

    model: str | None = None
    draft: str | None = None
    tokenizer: str | None = None
    device: str = "auto"
    dtype: Dtype = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    verify_policy: VerifyPolicyName = "auto"
    num_speculative_tokens: int | None = None
    confidence_threshold: float = 0.3
    length_head_rate: float = 1.0
    length_head_min: int = 1
    sampling_coupling: SamplingCoupling = "gumbel"
    strict_ops: bool = False
    enforce_eager: bool = False
    num_threads: int | None = None

    def __post_init__(self) -> None:
        _require_choice("dtype", self.dtype, get_args(Dtype))
        _require_choice("verify_policy", self.verify_policy, get_args(VerifyPolicyName))
        _require_choice("sampling_coupling", self.sampling_coupling, get_args(SamplingCoupling))
        for name in ("num_kv_blocks", "kv_cache_memory_bytes", "block_size", "num_threads", "num_speculative_tokens"):
            _require_int(name, getattr(self, name), 1)
        for name in ("max_num_seqs", "max_num_batched_tokens", "length_head_min"):
            _require_int(name, getattr(self, name), 1)
        _require_int("max_model_len", self.max_model_len, 2)
        _require_int("seed", self.seed, 0)
        _require(
            0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", self.gpu_memory_utilization, "in (0, 1]"
        )
        _require(0 <= self.confidence_threshold <= 1, "confidence_threshold", self.confidence_threshold, "in [0, 1]")
        _require(0 < self.length_head_rate <= 16, "length_head_rate", self.length_head_rate, "in (0, 16]")
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError("num_kv_blocks and kv_cache_memory_bytes are both given: give one of them")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> EngineConfig:
        """Build a config from plain keys; an unknown key is an error that names the nearest known one."""
        return cls(**_check_keys(values, dataclasses.fields(cls)))


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens, whom it lets in, and how much it buffers.

    Attributes:
        host: Address to bind; off loopback without `api_key` or TLS, a warning is logged.
        grpc_port: Port of the gRPC API; 0 picks a free one.
        metrics_port: Port of the Prometheus metrics over HTTP; 0 picks a free one, None serves none.
        served_model_name: Name clients see; None is the model directory's name.
        api_key: Bearer token clients must send; None lets everybody in.
        ssl_certfile: PEM certificate; with `ssl_keyfile` switches TLS on.
        ssl_keyfile: PEM private key.
        ssl_ca_certs: PEM authorities; with `ssl_cert_required` clients must present a certificate (mTLS).
        ssl_cert_required: Require and verify a client certificate.
        max_message_bytes: Largest gRPC message accepted.
        max_num_waiting: Unfinished requests allowed beyond `max_num_seqs`, whatever their n; one more is refused with
            RESOURCE_EXHAUSTED.
        max_stream_buffer_bytes: Largest message of a reply stream, and so what a stream holds for a client that does
            not read; what merged to more meanwhile is split.
        stream_stall_timeout_s: A client that reads nothing for so long while a message waits is cut; at least 0.1.
        shutdown_grace_period_s: After SIGTERM, seconds in which new calls are still accepted.
        shutdown_timeout_s: Seconds running requests get to finish on shutdown.
    """

    host: str = "127.0.0.1"
    grpc_port: int = 50051
    metrics_port: int | None = None
    served_model_name: str | None = None
    api_key: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_required: bool = False
    max_message_bytes: int = 4 * 1024 * 1024
    max_num_waiting: int = 256
    max_stream_buffer_bytes: int = 64 * 1024
    stream_stall_timeout_s: float = 60.0
    shutdown_grace_period_s: float = 0.0
    shutdown_timeout_s: float = 45.0

    def __post_init__(self) -> None:
        for name in ("grpc_port", "metrics_port"):
            port = getattr(self, name)
            _require(port is not None or name == "metrics_port", name, port, "an integer in [0, 65535]")
            _require_int(name, port, 0)
            _require((port or 0) <= 65535, name, port, "in [0, 65535]")
        is_clash = self.grpc_port != 0 and self.grpc_port == self.metrics_port
        _require(not is_clash, "metrics_port", self.metrics_port, f"another port than grpc_port={self.grpc_port}")
        for name in ("max_message_bytes", "max_num_waiting", "max_stream_buffer_bytes"):
            _require_min(name, getattr(self, name), 1)
        _require_min("stream_stall_timeout_s", self.stream_stall_timeout_s, 0.1)
        for name in ("shutdown_grace_period_s", "shutdown_timeout_s"):
            _require_min(name, getattr(self, name), 0)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile go together: one of them is missing")
        if self.ssl_cert_required and self.ssl_ca_certs is None:
            raise ConfigError("ssl_cert_required needs ssl_ca_certs: the authorities that sign client certificates")
        if self.ssl_ca_certs is not None and not (self.ssl_certfile and self.ssl_cert_required):
            raise ConfigError("ssl_ca_certs has no effect without ssl_certfile, ssl_keyfile and ssl_cert_required")
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{name}={path!r} is not a file")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> ServerConfig:
        """Build a config from plain keys; an unknown key is an error that names the nearest known one."""
        return cls(**_check_keys(values, dataclasses.fields(cls)))


@dataclass(frozen=True)
class OnlineConfig:
    """How a server learns from a trainer: what it hands over, and how it takes new versions of the drafter.

    Attributes:
        trainer: `host:port` of the trainer; None learns nothing.
        trainer_api_key: The trainer's token, not that of inference.
        trainer_ssl_ca_certs: PEM authorities the trainer's certificate must come from; switches TLS on.
        trainer_ssl_certfile: PEM certificate to show to the trainer (mTLS), with `trainer_ssl_keyfile`.
        trainer_ssl_keyfile: PEM private key of `trainer_ssl_certfile`.
        server_id: This server's name among the trainer's; None is the host's name and the gRPC port.
        online_dir: Where trajectories wait and versions are kept; one server at a time uses it. None is
            `servers/SERVER_ID` in the cache folder.
        supervision: `captured` hands over the target's features too, so that the trainer need not run the target;
            `recompute` only tokens.
        trajectory_sampling_rate: Share of the requests whose tokens are handed over, in [0, 1]; a request can forbid
            it with `allow_training`.
        trajectory_min_tokens: Shorter outputs are not handed over.
        trajectory_bytes: Most bytes of trajectories that wait on disk; the oldest go first.
        trajectory_age_s: Trajectories that wait for longer are dropped.
        canary_fraction: Share of the new requests that a version on trial drafts for.
        canary_max_drop: Relative drop of the acceptance length that is tolerated.
        canary_error_rate: Probability that a version within that limit is ever rolled back.
        canary_min_requests: Requests of either version before anything is decided.
        canary_max_requests: Requests after which a version is promoted unless it has been found worse.
        drain_timeout_s: What requests of a replaced version get to finish with it when the next version waits.
        trainer_wait_s: What a starting server gets to catch up with the trainer before it reports SERVING; after that,
            and when the trainer is not there, it serves with what it has.
    """

    trainer: str | None = None
    trainer_api_key: str | None = None
    trainer_ssl_ca_certs: str | None = None
    trainer_ssl_certfile: str | None = None
    trainer_ssl_keyfile: str | None = None
    server_id: str | None = None
    online_dir: str | None = None
    supervision: Supervision = "captured"
    trajectory_sampling_rate: float = 1.0
    trajectory_min_tokens: int = 8
    trajectory_bytes: int = 1 << 30
    trajectory_age_s: float = 86400.0
    canary_fraction: float = 0.25
    canary_max_drop: float = 0.05
    canary_error_rate: float = 1e-4
    canary_min_requests: int = 12
    canary_max_requests: int = 200
    drain_timeout_s: float = 30.0
    trainer_wait_s: float = 30.0

    def __post_init__(self) -> None:
        _require_choice("supervision", self.supervision, get_args(Supervision))
        if self.trainer is not None:
            host, _, port = self.trainer.rpartition(":")
            _require(bool(host) and port.isdecimal(), "trainer", self.trainer, "host:port")
        _require(0 <= self.trajectory_sampling_rate <= 1, *_named(self, "trajectory_sampling_rate"), "in [0, 1]")
        _require_int("trajectory_min_tokens", self.trajectory_min_tokens, 2)
        _require_int("trajectory_bytes", self.trajectory_bytes, MIN_TRAJECTORY_BYTES)
        _require(self.trajectory_age_s > 0, *_named(self, "trajectory_age_s"), "> 0")
        for name in ("drain_timeout_s", "trainer_wait_s"):
            _require(0 <= getattr(self, name) < math.inf, *_named(self, name), "finite and >= 0")
        if (self.trainer_ssl_certfile is None) != (self.trainer_ssl_keyfile is None):
            raise ConfigError("trainer_ssl_certfile and trainer_ssl_keyfile go together: one of them is missing")
        if self.trainer_ssl_certfile is not None and self.trainer_ssl_ca_certs is None:
            raise ConfigError("trainer_ssl_certfile has no effect without trainer_ssl_ca_certs, which switches TLS on")
        for name in ("trainer_ssl_ca_certs", "trainer_ssl_certfile", "trainer_ssl_keyfile"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{name}={path!r} is not a file")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> OnlineConfig:
        """Build a config from plain keys; an unknown key is an error that names the nearest known one."""
        return cls(**_check_keys(values, dataclasses.fields(cls)))


def _named(config: object, field: str) -> tuple[str, object]:
    return field, getattr(config, field)


def _check_keys(values: Mapping[str, object], fields: tuple[dataclasses.Field[object], ...]) -> dict[str, Any]:
    known = [field.name for field in fields]
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown setting {key!r}{suggest(key, known)}")
    return dict(values)


def check_environment(environ: Mapping[str, str] | None = None, further: Iterable[str] = ()) -> None:
    """Raise ConfigError for an `ADAFLASH_` variable that nothing reads, with the nearest one that is read.

    Args:
        environ: The environment; None takes the process's.
        further: Names of settings that are read besides those of this module's configs.
    """
    fields = [field for config in (EngineConfig, ServerConfig, OnlineConfig) for field in dataclasses.fields(config)]
    known = {_CACHE_DIR, *(field.name.upper() for field in fields), *(name.upper() for name in further)}
    for variable, value in sorted((os.environ if environ is None else environ).items()):
        name = variable.removeprefix(ENV_PREFIX)
        if variable.startswith(ENV_PREFIX) and name not in known and not _is_service_link(variable, value):
            raise ConfigError(f"unknown environment variable {variable!r}{suggest(name, known, ENV_PREFIX)}")


def _is_service_link(variable: str, value: str) -> bool:
    """Return whether Kubernetes set this variable, for a Service named `adaflash` or `adaflash-*`."""
    return _SERVICE_LINK.search(variable) is not None or (variable.endswith("PORT") and "://" in value)


def environment_overrides(field_names: Iterable[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings given as `ADAFLASH_<FIELD>` variables, still as strings, keyed by field name."""
    source = os.environ if environ is None else environ
    found = {}
    for name in field_names:
        variable = ENV_PREFIX + name.upper()
        value = source.get(variable)
        if value is not None and not _is_service_link(variable, value):
            found[name] = value
    return found


def cache_dir() -> Path:
    """Return the folder for converted demo weights and profiles (`ADAFLASH_CACHE_DIR`, else `~/.cache/adaflash`)."""
    explicit = os.environ.get(ENV_PREFIX + _CACHE_DIR)
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "adaflash"
