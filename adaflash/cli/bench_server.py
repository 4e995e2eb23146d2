# SPDX-License-Identifier: Apache-2.0
"""Load for a running server over gRPC: every request once per pass, a fixed number of them at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from adaflash.cli.measure import BenchRequest, PassDone, PassResult, RequestResult, RunningRequest
from adaflash.request import EngineInfo
from adaflash.rpc.client import GenerateClient


async def bench_server(
    address: str,
    api_key: str | None,
    requests: Sequence[BenchRequest],
    concurrencies: Sequence[int],
    num_rounds: int,
    on_pass: PassDone,
) -> tuple[EngineInfo, list[PassResult]]:
    """Measure a server; concurrencies alternate round by round, after an unmeasured request.

    Raises:
        AdaFlashError: The server cannot be reached or refuses a request.
    """
    results: list[PassResult] = []
    async with GenerateClient(address, api_key=api_key) as client:
        info = (await client.server_info(timeout_s=30)).engine
        await _run_request(client, requests[0])
        for _ in range(num_rounds):
            for concurrency in concurrencies:
                result = await _run_pass(client, info.verify_policy, requests, concurrency)
                results.append(result)
                on_pass(result)
    return info, results


async def _run_pass(
    client: GenerateClient, policy: str, requests: Sequence[BenchRequest], concurrency: int
) -> PassResult:
    waiting = iter(enumerate(requests))
    done: dict[int, RequestResult] = {}
    started = time.perf_counter()
    workers = [asyncio.create_task(_work(client, waiting, done)) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
    seconds = time.perf_counter() - started
    return PassResult(policy, concurrency, seconds, [done[index] for index in range(len(requests))])


async def _work(
    client: GenerateClient, waiting: Iterator[tuple[int, BenchRequest]], done: dict[int, RequestResult]
) -> None:
    for index, request in waiting:
        done[index] = await _run_request(client, request)


async def _run_request(client: GenerateClient, request: BenchRequest) -> RequestResult:
    running = RunningRequest(time.perf_counter())
    async for delta in client.generate_stream(request.prompt, request.params):
        running.take(delta)
    return running.result()
