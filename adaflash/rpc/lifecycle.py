# SPDX-License-Identifier: Apache-2.0
"""Runs a server until a signal, then drains it; a second signal stops it at once."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine

from adaflash.config import ServerConfig
from adaflash.engine.base import EngineClient
from adaflash.rpc.server import GrpcServer

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalWatch:
    """Remembers SIGTERM and SIGINT: the first asks for a drain, the second for an end."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.last_signal = 0

    def install(self) -> None:
        """Take the signals over in the running loop."""
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def remove(self) -> None:
        """Give the signals back."""
        for number in SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        self.last_signal = number
        logger.info("signal received signal=%s second=%s", signal.Signals(number).name, self.first.is_set())
        (self.second if self.first.is_set() else self.first).set()


async def finish_unless_signalled(work: Coroutine[None, None, None], watch: SignalWatch) -> bool:
    """Run `work` to its end; a signal cancels it, and False is returned."""
    task, signalled = asyncio.create_task(work), asyncio.create_task(watch.first.wait())
    try:
        await asyncio.wait({task, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for one in (task, signalled):
            one.cancel()
        await asyncio.gather(task, signalled, return_exceptions=True)


async def run_until_signalled(
    server: GrpcServer, engine: EngineClient, config: ServerConfig, watch: SignalWatch
) -> int:
    """Wait for a signal and shut a started server down; the engine is closed on return.

    Health turns NOT_SERVING first, then new calls are still accepted for `shutdown_grace_period_s`, then the running
    requests get `shutdown_timeout_s` to finish.

    Returns:
        Exit code: 0 after a drain, 128 + signal number when a second signal cut it short.
    """
    try:
        await watch.first.wait()
        shutdown = asyncio.create_task(_shut_down(server, config))
        forced = asyncio.create_task(watch.second.wait())
        await asyncio.wait({shutdown, forced}, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if shutdown.done():
            shutdown.result()
            return 0
        logger.warning("shutdown forced: running requests are aborted")
        shutdown.cancel()
        await server.stop()
        return 128 + watch.last_signal
    finally:
        await engine.close()


async def _shut_down(server: GrpcServer, config: ServerConfig) -> None:
    await server.announce_shutdown()
    logger.info("draining grace_s=%s timeout_s=%s", config.shutdown_grace_period_s, config.shutdown_timeout_s)
    await asyncio.sleep(config.shutdown_grace_period_s)
    finished = await server.drain()
    logger.info("drained all_finished=%s", finished)
