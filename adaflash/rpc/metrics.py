# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics: the engine's counters under vLLM's names, our own under `adaflash:`, and one HTTP endpoint."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from adaflash.engine.base import EngineClient
from adaflash.errors import ConfigError
from adaflash.request import EngineInfo, EngineStats

_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("vllm:spec_decode_num_drafts", "Drafts made.", "num_drafts"),
    ("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", "num_drafted_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.", "num_accepted_tokens"),
    ("vllm:prompt_tokens", "Prompt tokens whose prefill is done.", "num_prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "num_output_tokens"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "num_prompt_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "num_cached_tokens"),
    ("vllm:num_preemptions", "Requests preempted for want of KV blocks.", "num_preemptions"),
    ("adaflash:requests_finished", "Requests that ended, in whatever way.", "num_finished"),
    ("adaflash:steps", "Engine steps.", "num_steps"),
    ("adaflash:plain_steps", "Engine steps in which nothing drafted.", "num_plain_steps"),
    ("adaflash:verified_tokens", "Drafted tokens the target verified.", "num_verified_tokens"),
    (
        "adaflash:expected_accepted_tokens",
        "Drafts that policy goodput expected to be accepted.",
        "expected_accepted_tokens",
    ),
)
_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("vllm:num_requests_running", "Sequences in the running batch.", "num_running"),
    ("vllm:num_requests_waiting", "Sequences waiting for admission.", "num_waiting"),
    ("adaflash:kv_blocks_free", "KV blocks nobody uses.", "num_free_blocks"),
    ("adaflash:kv_blocks_total", "KV blocks of the pool.", "num_total_blocks"),
)
_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class EngineCollector(Collector):
    """Reads the engine's counters when Prometheus scrapes; keeps no numbers of its own."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, labelled with the model's name."""
        stats, info = self._engine.stats(), self._engine.info
        for name, help_text, field in _COUNTERS:
            yield self._counter(name, help_text, [((), getattr(stats, field))])
        for name, help_text, field in _GAUGES:
            yield self._gauge(name, help_text, getattr(stats, field))
        yield from self._speculation(stats)
        used = 1 - stats.num_free_blocks / stats.num_total_blocks if stats.num_total_blocks else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", used)
        parts = [((part,), seconds) for part, seconds in stats.step_time_s.items()]
        yield self._counter("adaflash:step_seconds", "Seconds spent in steps, by part.", parts, ("part",))
        yield from self._info(info)

    def _speculation(self, stats: EngineStats) -> Iterator[Metric]:
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        positions = [((str(k),), count) for k, count in enumerate(stats.num_accepted_per_position)]
        yield self._counter(name, "Accepted drafts by draft position.", positions, ("position",))
        lens = [((str(k),), count) for k, count in enumerate(stats.verify_lens)]
        yield self._counter("adaflash:drafts_by_verify_len", "Drafts by tokens verified.", lens, ("verify_len",))
        yield self._gauge(
            "adaflash:survival_calibration_error",
            "Expected calibration error of the acceptance that policy goodput predicts, 0 to 1.",
            stats.calibration_error,
        )
        length = 1 + stats.num_accepted_tokens / stats.num_drafts if stats.num_drafts else 0.0
        yield self._gauge(
            "adaflash:acceptance_length", "Mean tokens per draft round, the bonus token included.", length
        )

    def _info(self, info: EngineInfo) -> Iterator[Metric]:
        active = InfoMetricFamily("adaflash:engine", "What is active.", labels=["model_name"])
        values = {
            "device": info.device,
            "dtype": info.dtype,
            "draft": info.draft or "",
            "verify_policy": info.verify_policy,
            "sampling_coupling": info.sampling_coupling,
        }
        active.add_metric([self._model_name], values)
        yield active
        if info.drafter_version is not None:
            yield self._gauge("adaflash:drafter_version", "Version of the active drafter.", info.drafter_version)
        native = sum(kind == "native" for kind in info.op_table.values())
        yield self._gauge("adaflash:native_ops", "Ops the backend runs itself; the rest run the reference.", native)

    def _counter(
        self,
        name: str,
        help_text: str,
        samples: Iterable[tuple[tuple[str, ...], float]],
        labels: tuple[str, ...] = (),
    ) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=["model_name", *labels])
        for label_values, value in samples:
            family.add_metric([self._model_name, *label_values], value)
        return family

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help_text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


class RpcMetrics:
    """Counts calls by method and outcome, and measures how long requests wait for their first and last delta."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._calls = Counter("adaflash:rpc_calls", "Calls that ended.", ["method", "code"], registry=registry)
        labels, buckets = ["model_name"], _LATENCY_BUCKETS
        self._first_token = Histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first delta.", labels, registry=registry, buckets=buckets
        ).labels(model_name)
        self._latency = Histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last delta.", labels, registry=registry, buckets=buckets
        ).labels(model_name)

    def call_finished(self, method: str, code: str) -> None:
        """Count a call that ended."""
        self._calls.labels(method, code).inc()

    def first_token(self, seconds: float) -> None:
        """Take the time from a request's arrival to its first delta."""
        self._first_token.observe(seconds)

    def request_finished(self, seconds: float) -> None:
        """Take the time from a request's arrival to its last delta."""
        self._latency.observe(seconds)


class MetricsEndpoint:
    """Serves a registry over HTTP from its own thread; `port` 0 picks a free one."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        try:
            self._server, self._thread = self._start(registry, host, port)
        except OSError as error:
            raise ConfigError(f"metrics_port={port} cannot be bound on {host}: {error}") from error
        self.port: int = self._server.server_port

    @staticmethod
    def _start(registry: CollectorRegistry, host: str, port: int) -> tuple[WSGIServer, threading.Thread]:
        return start_http_server(port, addr=host, registry=registry)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
