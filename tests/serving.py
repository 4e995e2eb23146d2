# SPDX-License-Identifier: Apache-2.0
"""Starts a server around an engine on a free loopback port, and reaches it at the level of bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from adaflash.config import ServerConfig
from adaflash.rpc.client import GenerateClient
from adaflash.rpc.server import GrpcServer
from tests.fake_engine import FakeEngine


@dataclass
class Served:
    """A running server and what is around it."""

    server: GrpcServer
    engine: FakeEngine
    client: GenerateClient

    @property
    def address(self) -> str:
        return self.server.address


@asynccontextmanager
async def serving(engine: FakeEngine | None = None, **config: Any) -> AsyncIterator[Served]:
    """Serve `engine` with a ServerConfig of `config` while the block runs."""
    engine = engine or FakeEngine()
    server = GrpcServer(engine, ServerConfig(grpc_port=0, **config))
    await server.start()
    try:
        async with GenerateClient(server.address, api_key=config.get("api_key")) as client:
            yield Served(server, engine, client)
    finally:
        await server.stop()


def run(coroutine: Coroutine[Any, Any, None], timeout_s: float = 30.0) -> None:
    """Run a test's coroutine with a limit, so that a hang is a failure and not a wait."""
    asyncio.run(asyncio.wait_for(coroutine, timeout_s))


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> float:
    """Wait until the condition holds and return how long that took; fails after `timeout_s`."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    while not condition():
        assert loop.time() - started < timeout_s, "the condition never came true"
        await asyncio.sleep(0.005)
    return loop.time() - started


async def call_raw(channel: grpc.aio.Channel, method: str, data: bytes, timeout_s: float = 5.0) -> grpc.StatusCode:
    """Send bytes to a method, read all replies, and return the status code."""
    call = channel.unary_stream(method, request_serializer=None, response_deserializer=None)(data, timeout=timeout_s)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await call.code()
