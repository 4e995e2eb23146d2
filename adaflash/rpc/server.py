# SPDX-License-Identifier: Apache-2.0
"""The gRPC server: binds, authenticates, reports health, and drains; knows nothing of processes and signals."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from adaflash.config import ServerConfig
from adaflash.engine.base import EngineClient
from adaflash.rpc.interceptors import ApiKeyInterceptor, BoundaryInterceptor
from adaflash.rpc.listener import bind, channel_options, join_host_port, warn_when_open
from adaflash.rpc.metrics import EngineCollector, MetricsEndpoint, RpcMetrics
from adaflash.rpc.pb import generate_pb2_grpc
from adaflash.rpc.service import SERVICE_NAME, GenerationService

logger = logging.getLogger(__name__)

# Least time the last messages of drained streams get to reach their clients.
FLUSH_TIMEOUT_S = 2.0
# Time the statuses of finished calls get; calls that never end by themselves, e.g. health watches, are cut after it.
STATUS_TIMEOUT_S = 0.2


class GrpcServer:
    """Serves one engine; `start`, then `drain` or `stop`.

    How many requests run and wait is the engine's to bound (CapacityError); grpc's own limit on calls is not used, for
    it counts health checks and gives no retry hint.

    Args:
        engine: What generates; the server does not close it.
        config: Where to listen, whom to let in, how much to buffer.
        collectors: More metrics to serve.
    """

    def __init__(self, engine: EngineClient, config: ServerConfig, collectors: Iterable[Collector] = ()) -> None:
        self._engine = engine
        self._config = config
        self._model_name = config.served_model_name or engine.info.model
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in grpc-stubs
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, self._model_name))
        for collector in collectors:
            self._registry.register(collector)
        self._metrics = RpcMetrics(self._registry, self._model_name)
        self._metrics_endpoint: MetricsEndpoint | None = None
        self._service = GenerationService(engine, config, self._metrics, self._on_unavailable)
        self._server = self._build_server()
        self._is_serving = False
        self.port = 0

    @property
    def address(self) -> str:
        """Host and port clients connect to."""
        return join_host_port(self._config.host, self.port)

    @property
    def metrics_address(self) -> str | None:
        """Host and port of the metrics, None when they are not served."""
        endpoint = self._metrics_endpoint
        return None if endpoint is None else join_host_port(self._config.host, endpoint.port)

    async def start(self) -> None:
        """Bind and accept calls; health turns SERVING last.

        Raises:
            ConfigError: The address cannot be bound or the TLS files cannot be used.
        """
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.port = bind(self._server, self._config)
        if self._config.metrics_port is not None:
            self._metrics_endpoint = MetricsEndpoint(self._registry, self._config.host, self._config.metrics_port)
        warn_when_open(self._config)
        await self._server.start()
        self._is_serving = True
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def announce_shutdown(self) -> None:
        """Turn health to NOT_SERVING for good, so that balancers look elsewhere; calls are still accepted."""
        self._is_serving = False
        await self._health.enter_graceful_shutdown()

    async def drain(self) -> bool:
        """Refuse new requests, let the running ones finish within `shutdown_timeout_s`, then stop.

        Returns:
            Whether all running requests finished; the others were aborted.
        """
        await self.announce_shutdown()
        deadline = time.monotonic() + self._config.shutdown_timeout_s
        finished = await self._engine.drain(self._config.shutdown_timeout_s)
        deadline = max(deadline, time.monotonic() + FLUSH_TIMEOUT_S)
        while self._service.num_active and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await self.stop(STATUS_TIMEOUT_S)
        return finished

    async def stop(self, grace_s: float = 0.0) -> None:
        """Close the port; calls still open after `grace_s` are cancelled, which aborts their requests."""
        await self._server.stop(grace_s)
        if self._metrics_endpoint is not None:
            self._metrics_endpoint.close()
            self._metrics_endpoint = None

    def _build_server(self) -> grpc.aio.Server:
        interceptors: list[grpc.aio.ServerInterceptor] = [BoundaryInterceptor(self._metrics)]  # type: ignore[type-arg]
        if self._config.api_key is not None:
            interceptors.append(ApiKeyInterceptor(self._config.api_key))
        server = grpc.aio.server(interceptors=interceptors, options=channel_options(self._config))
        generate_pb2_grpc.add_GenerationServicer_to_server(self._service, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return server

    async def _on_unavailable(self) -> None:
        """Report NOT_SERVING: the engine has failed, or drains, which health has said already."""
        if self._is_serving:
            self._is_serving = False
            logger.error("the engine takes no requests any more: health is NOT_SERVING until a restart")
            await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in (health.OVERALL_HEALTH, SERVICE_NAME):
            await self._health.set(name, status)
