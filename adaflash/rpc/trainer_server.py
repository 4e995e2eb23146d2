# SPDX-License-Identifier: Apache-2.0
"""The trainer's gRPC server: binds, authenticates, reports health, and drains."""

from __future__ import annotations

import asyncio
import time

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from adaflash.config import ServerConfig
from adaflash.rpc.interceptors import ApiKeyInterceptor, BoundaryInterceptor
from adaflash.rpc.listener import bind, channel_options, join_host_port, warn_when_open
from adaflash.rpc.pb import trainer_pb2_grpc
from adaflash.rpc.trainer_service import SERVICE_NAME, TrainerService
from adaflash.rpc.trajectory_intake import TrajectorySink
from adaflash.training.weight_store import WeightStore

# Time the statuses of finished calls get; calls that never end by themselves, e.g. health watches, are cut after it.
STATUS_TIMEOUT_S = 0.2


class TrainerServer:
    """Serves one weight store; `start`, then `drain` or `stop`. The store stays open.

    Args:
        store: Whose versions are handed out.
        sink: Takes the trajectories.
        target_digest: Of the target that is trained for.
        config: Where to listen, whom to let in (`api_key` is the trainer's own token), TLS, `max_message_bytes` (which
            bounds a trajectory), `stream_stall_timeout_s` and `shutdown_timeout_s`; the rest is about generation.
    """

    def __init__(self, store: WeightStore, sink: TrajectorySink, target_digest: str, config: ServerConfig) -> None:
        self._config = config
        self._service = TrainerService(store, sink, target_digest, config.stream_stall_timeout_s)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in grpc-stubs
        interceptors: list[grpc.aio.ServerInterceptor] = [BoundaryInterceptor()]  # type: ignore[type-arg]
        if config.api_key is not None:
            interceptors.append(ApiKeyInterceptor(config.api_key))
        self._server = grpc.aio.server(interceptors=interceptors, options=channel_options(config))
        trainer_pb2_grpc.add_TrainerServicer_to_server(self._service, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self.port = 0

    @property
    def address(self) -> str:
        """Host and port clients connect to."""
        return join_host_port(self._config.host, self.port)

    async def start(self) -> None:
        """Bind and accept calls; health turns SERVING last.

        Raises:
            ConfigError: The address cannot be bound or the TLS files cannot be used.
        """
        self.port = bind(self._server, self._config)
        warn_when_open(self._config)
        self._service.open()
        await self._server.start()
        for name in (health.OVERALL_HEALTH, SERVICE_NAME):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def drain(self) -> bool:
        """End the subscriptions, let other calls finish within `shutdown_timeout_s`, then stop.

        Returns:
            Whether all calls finished; the others were cut.
        """
        await self._health.enter_graceful_shutdown()
        self._service.close()
        deadline = time.monotonic() + self._config.shutdown_timeout_s
        while self._service.num_active and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        finished = self._service.num_active == 0
        await self._server.stop(STATUS_TIMEOUT_S)
        return finished

    async def stop(self) -> None:
        """Close the port and cut every call."""
        self._service.close()
        await self._server.stop(0)
