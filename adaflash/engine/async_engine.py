# SPDX-License-Identifier: Apache-2.0
"""The engine behind an event loop: one thread steps, every request has its own stream of deltas."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TypeVar

from adaflash.config import EngineConfig
from adaflash.engine.capture import CaptureConfig
from adaflash.engine.engine import Engine
from adaflash.engine.loading import LoadProgress
from adaflash.engine.merge import OutputMerger
from adaflash.errors import CapacityError, UnavailableError
from adaflash.request import EngineInfo, EngineStats, Prompt, Request, RequestOutput, SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _Stream:
    """One request's deltas on the event loop; what a slow reader has not taken is merged into one delta.

    Attributes:
        submitted: Whether the engine has taken the request; set by the engine's thread.
        finished: Whether the last delta was read.
        closed: Whether nobody reads any more.
    """

    def __init__(self) -> None:
        self.submitted = False
        self.finished = False
        self.closed = False
        self._pending = OutputMerger()
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, delta: RequestOutput) -> None:
        self._pending.add(delta)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._ready.set()

    async def get(self) -> RequestOutput:
        """Return everything committed since the last call."""
        await self._ready.wait()
        pending, self._pending = self._pending, OutputMerger()
        if pending.is_empty:
            assert self._error is not None, "a stream wakes up for a delta or an error"
            raise self._error
        if self._error is None:
            self._ready.clear()
        delta = pending.result()
        self.finished = delta.finished
        return delta


class AsyncEngine:
    """Serves requests concurrently from one event loop; implements `EngineClient`.

    Args:
        config: What to load; loading blocks the caller.
        max_num_waiting: Unfinished requests allowed beyond `max_num_seqs`, whatever their n; one more is refused.
        progress: See `Engine`.
        engine: A loaded engine to use instead; it belongs to this object from then on.
        capture: See `Engine`.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_num_waiting: int = 256,
        progress: LoadProgress | None = None,
        engine: Engine | None = None,
        capture: CaptureConfig | None = None,
    ) -> None:
        self._engine = engine or Engine(config, progress, capture=capture)
        self._max_num_requests = config.max_num_seqs + max_num_waiting
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, _Stream] = {}
        self._num_open = 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._draining = False
        self._closing = False
        self._stopped = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="adaflash-engine", daemon=True)
        self._thread.start()

    # ---- the event loop's side -------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What is being served."""
        return self._engine.info

    def stats(self) -> EngineStats:
        """Return the current gauges and counters."""
        return self._engine.stats()

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `EngineClient.generate`."""
        self._check_admission()
        self._num_open += 1
        try:
            request = await asyncio.to_thread(self._engine.prepare, prompt, params, request_id)
            self._check_running()
            async with self._stream_of(request) as stream:
                while not stream.finished:
                    yield await stream.get()
        finally:
            self._num_open -= 1

    async def abort(self, request_id: str) -> bool:
        """See `EngineClient.abort`."""
        return await self._call(lambda: self._abort_now(request_id))

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function` on the engine in its own thread, between two steps, and return the result.

        It must be quick: no token is generated meanwhile.
        """
        return await self._call(lambda: function(self._engine))

    async def set_verify_policy(self, name: str) -> None:
        """Switch the verify policy between two steps."""
        await self.call(lambda engine: engine.set_verify_policy(name))

    async def drain(self, timeout_s: float) -> bool:
        """See `EngineClient.drain`."""
        self._draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._num_open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        unfinished = list(self._streams)
        for request_id in unfinished:
            await self.abort(request_id)
        return not unfinished

    async def close(self) -> None:
        """See `EngineClient.close`."""
        self._closing = True
        self._inbox.put(lambda: None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._engine.close)
        self._fail_streams(UnavailableError("the server is shutting down"))

    def _check_admission(self) -> None:
        self._check_running()
        if self._num_open >= self._max_num_requests:
            raise CapacityError(f"{self._num_open} requests are running or waiting, the limit is reached")

    def _check_running(self) -> None:
        if self._failure is not None:
            raise UnavailableError("the engine has stopped after an internal error") from self._failure
        if self._draining or self._closing:
            raise UnavailableError("the server is shutting down")

    @asynccontextmanager
    async def _stream_of(self, request: Request) -> AsyncIterator[_Stream]:
        """Submit a request between two steps, and abort it when its stream is left before the end.

        Raises:
            RequestError: Its id is in use.
        """
        self._loop = asyncio.get_running_loop()
        stream = _Stream()
        try:
            await self._call(lambda: self._submit_now(request, stream))
            yield stream
        finally:
            stream.closed = True
            if self._streams.get(request.request_id) is stream:
                del self._streams[request.request_id]
            if not stream.finished:
                self._inbox.put(lambda: self._abandon_now(request, stream))

    async def _call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine's thread between two steps and return its result."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed to the caller
                future.set_exception(error)

        self._inbox.put(run)
        if self._stopped:
            self._drain_inbox()
        return await asyncio.wrap_future(future)

    def _register(self, request_id: str, stream: _Stream) -> None:
        if not stream.closed:
            self._streams[request_id] = stream

    def _deliver(self, deltas: list[RequestOutput]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.put(delta)

    def _fail_streams(self, error: Exception) -> None:
        for stream in self._streams.values():
            stream.fail(error)

    # ---- the engine thread's side ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_commands()
                deltas = self._engine.step()
                if deltas:
                    self._post(lambda deltas=deltas: self._deliver(deltas))  # type: ignore[misc]
        except Exception as error:
            logger.exception("engine failed")
            self._failure = error
            failure = UnavailableError(f"the engine has stopped after an internal error: {type(error).__name__}")
            self._post(lambda: self._fail_streams(failure))
        self._drain_inbox()
        self._stopped = True
        # A command put before `_stopped` was visible runs here, a later one in `_call`.
        self._drain_inbox()

    def _take_commands(self) -> None:
        if not self._engine.has_unfinished():
            self._engine.rest()
            self._inbox.get()()
        self._drain_inbox()

    def _drain_inbox(self) -> None:
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command()

    def _abort_now(self, request_id: str) -> bool:
        delta = self._engine.abort(request_id)
        if delta is not None:
            self._post(lambda: self._deliver([delta]))
        return delta is not None

    def _submit_now(self, request: Request, stream: _Stream) -> None:
        self._check_running()  # The step before may have failed.
        self._engine.submit(request)
        stream.submitted = True
        # Posted between the deltas of an earlier request of this name and the first of this one.
        self._post(lambda: self._register(request.request_id, stream))

    def _abandon_now(self, request: Request, stream: _Stream) -> None:
        """Abort a request nobody reads any more; one that was never taken must not end another of its name."""
        if stream.submitted:
            self._engine.abort(request.request_id)

    def _post(self, callback: Callable[[], None]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(callback)
