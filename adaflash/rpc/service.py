# SPDX-License-Identifier: Apache-2.0
"""The Generation service: four calls, each a translation to and from the engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeAlias

import grpc

from adaflash import __version__
from adaflash.config import ServerConfig
from adaflash.engine.base import EngineClient
from adaflash.engine.merge import OutputMerger
from adaflash.errors import UnavailableError
from adaflash.request import RequestOutput
from adaflash.rpc import convert
from adaflash.rpc.metrics import RpcMetrics
from adaflash.rpc.pb import generate_pb2 as pb
from adaflash.rpc.pb import generate_pb2_grpc
from adaflash.rpc.stream import StreamWriter

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Generation"].full_name

GenerateContext: TypeAlias = "grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]"


class GenerationService(generate_pb2_grpc.GenerationServicer):
    """Serves `adaflash.v1.Generation`; errors leave as AdaFlashError, the interceptors turn them into statuses.

    A cancelled call (client gone, deadline passed, server stopping) closes the engine's iterator, which aborts the
    request within one step.

    Args:
        engine: What generates.
        config: Limits of reply streams, and the model's name.
        metrics: Told how long requests take.
        on_unavailable: Called when the engine refuses because it is draining or has failed.

    Attributes:
        num_active: Requests whose replies are not all handed to gRPC yet.
    """

    def __init__(
        self,
        engine: EngineClient,
        config: ServerConfig,
        metrics: RpcMetrics,
        on_unavailable: Callable[[], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._config = config
        self._metrics = metrics
        self._on_unavailable = on_unavailable
        self.num_active = 0

    async def Generate(self, request: pb.GenerateRequest, context: GenerateContext) -> pb.GenerateResponse:  # noqa: N802
        """Run a request to its end and reply once."""
        merger = OutputMerger()
        async with aclosing(self._run(request)) as outputs:
            async for output in outputs:
                merger.add(output)
        return convert.output_to_pb(merger.result())

    async def GenerateStream(self, request: pb.GenerateRequest, context: GenerateContext) -> None:  # noqa: N802
        """Reply with deltas, as they come."""
        writer = StreamWriter(context, self._config.max_stream_buffer_bytes, self._config.stream_stall_timeout_s)
        async with aclosing(self._run(request)) as outputs:
            async for output in outputs:
                await writer.write(output)

    async def Abort(self, request: pb.AbortRequest, context: object) -> pb.AbortResponse:  # noqa: N802
        """Stop requests by id."""
        aborted = [request_id for request_id in request.request_ids if await self._engine.abort(request_id)]
        return pb.AbortResponse(aborted_request_ids=aborted)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: object) -> pb.ServerInfo:  # noqa: N802
        """Say what is served and how busy it is."""
        info = self._engine.info
        message = convert.server_info_to_pb(info, self._engine.stats(), __version__)
        message.model = self._config.served_model_name or message.model
        return message

    async def _run(self, request: pb.GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        started = time.monotonic()
        call = convert.call_from_pb(request)
        stream = self._engine.generate(call.prompt, call.params, call.request_id or uuid.uuid4().hex)
        is_first = True
        self.num_active += 1
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    if is_first:
                        self._metrics.first_token(time.monotonic() - started)
                        is_first = False
                    yield output
        except UnavailableError:
            await self._on_unavailable()
            raise
        finally:
            self.num_active -= 1
        self._metrics.request_finished(time.monotonic() - started)
