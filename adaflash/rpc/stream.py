# SPDX-License-Identifier: Apache-2.0
"""Writes one reply stream with bounded memory and cuts a client that does not read.

`context.write` waits for flow control, and nothing is read from the engine meanwhile: the engine merges the deltas it
cannot hand out. So the server holds one message per stream, at most `max_bytes`, however slow the client is. What
was written before lies in the client's own receive window (measured: 5-6 MB there, under 0.1 MB in this process).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from adaflash.request import CompletionOutput, RequestOutput
from adaflash.rpc import convert
from adaflash.rpc.pb import generate_pb2 as pb
from adaflash.rpc.status import StreamStalledError


class StreamWriter:
    """Writes the deltas of one stream.

    Args:
        context: The call to write to; used from the task that created the writer.
        max_bytes: Largest message; a bigger delta is split.
        stall_timeout_s: How long one message may wait for the client.
    """

    def __init__(
        self,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
        max_bytes: int,
        stall_timeout_s: float,
    ) -> None:
        self._context = context
        self._max_bytes = max_bytes
        self._stall_timeout_s = stall_timeout_s

    async def write(self, output: RequestOutput) -> None:
        """Send one delta; raises StreamStalledError when the client takes nothing for `stall_timeout_s`."""
        for message in split_output(output, self._max_bytes):
            await write_within(self._context, message, self._stall_timeout_s)


async def write_within(context: grpc.aio.ServicerContext[Any, Any], message: Message, timeout_s: float) -> None:
    """Write one message from the task that serves the call.

    Raises:
        StreamStalledError: The client took nothing for `timeout_s`.
    """
    task = asyncio.current_task()
    assert task is not None, "a stream is written by a task"
    has_stalled = False

    def cut() -> None:
        nonlocal has_stalled
        has_stalled = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(timeout_s, cut)
    try:
        await context.write(message)
    except asyncio.CancelledError:
        if not has_stalled:
            raise
        raise StreamStalledError(
            f"the client read nothing for {timeout_s} s while data waited; the stream was cut"
        ) from None
    finally:
        timer.cancel()


def split_output(output: RequestOutput, max_bytes: int) -> Iterator[pb.GenerateResponse]:
    """Yield the messages of a delta, each at most `max_bytes` unless one token alone is bigger.

    Concatenated they are the delta; what ends a stream is on the last one.
    """
    message = convert.output_to_pb(output)
    if message.ByteSize() <= max_bytes:
        yield message
        return
    halves = _halve(output)
    if halves is None:
        yield message
        return
    for half in halves:
        yield from split_output(half, max_bytes)


def _halve(output: RequestOutput) -> tuple[RequestOutput, RequestOutput] | None:
    if len(output.outputs) > 1:
        middle = len(output.outputs) // 2
        first, second = output.outputs[:middle], output.outputs[middle:]
    elif output.outputs and (len(output.outputs[0].token_ids) > 1 or len(output.outputs[0].text) > 1):
        head, tail = _halve_completion(output.outputs[0])
        first, second = [head], [tail]
    else:
        return None
    return (
        output._replace(outputs=first, finished=False),
        output._replace(outputs=second),
    )


def _halve_completion(completion: CompletionOutput) -> tuple[CompletionOutput, CompletionOutput]:
    token, char = (len(completion.token_ids) + 1) // 2, (len(completion.text) + 1) // 2
    logprobs = completion.logprobs
    head = dataclasses.replace(
        completion,
        text=completion.text[:char],
        token_ids=completion.token_ids[:token],
        logprobs=None if logprobs is None else logprobs[:token],
        finish_reason=None,
        stop_reason=None,
    )
    tail = dataclasses.replace(
        completion,
        text=completion.text[char:],
        token_ids=completion.token_ids[token:],
        logprobs=None if logprobs is None else logprobs[token:],
    )
    return head, tail
