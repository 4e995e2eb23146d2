# SPDX-License-Identifier: Apache-2.0
"""Milliseconds until a bad request is refused over gRPC, with the engine idle and while it generates.

Usage: python tools/bench/refusals.py [--repeats N] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import asdict, dataclass

import grpc

from adaflash import AsyncEngine, EngineConfig, SamplingParams, ServerConfig
from adaflash.rpc.client import GenerateClient
from adaflash.rpc.pb import generate_pb2 as pb
from adaflash.rpc.pb.generate_pb2_grpc import GenerationStub
from adaflash.rpc.server import GrpcServer


@dataclass(frozen=True)
class Refusal:
    """Latency of one kind of bad request, milliseconds."""

    case: str
    load: str
    median_ms: float
    max_ms: float


def bad_requests() -> dict[str, pb.GenerateRequest]:
    """Return requests that must be refused with INVALID_ARGUMENT."""
    good = pb.TokenIds(ids=[5, 6])
    return {
        "token id out of range": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**31])),
        "empty prompt": pb.GenerateRequest(token_ids=pb.TokenIds()),
        "no prompt": pb.GenerateRequest(),
        "max_tokens 0": pb.GenerateRequest(token_ids=good, sampling_params=pb.SamplingParams(max_tokens=0)),
        "temperature NaN": pb.GenerateRequest(
            token_ids=good, sampling_params=pb.SamplingParams(temperature=float("nan"))
        ),
        "top_p 0": pb.GenerateRequest(token_ids=good, sampling_params=pb.SamplingParams(top_p=0.0)),
        "stop id out of range": pb.GenerateRequest(
            token_ids=good, sampling_params=pb.SamplingParams(stop_token_ids=[2**31])
        ),
        "prompt of 100,000 tokens": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 100_000)),
    }


async def time_refusals(stub: GenerationStub, load: str, repeats: int) -> list[Refusal]:
    """Send every bad request `repeats` times, one at a time."""
    results = []
    for case, request in bad_requests().items():
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            code = await _status(stub, request)
            times.append((time.perf_counter() - started) * 1e3)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, f"{case}: {code}"
        results.append(Refusal(case, load, statistics.median(times), max(times)))
    return results


async def _status(stub: GenerationStub, request: pb.GenerateRequest) -> grpc.StatusCode:
    try:
        await stub.Generate(request)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def generate_forever(client: GenerateClient) -> None:
    """Keep the engine busy with one request after another."""
    while True:
        async for _ in client.generate_stream([5, 6, 7], SamplingParams(max_tokens=512, ignore_eos=True)):
            pass


async def run(repeats: int) -> list[Refusal]:
    """Serve the demo model on loopback and measure."""
    config = EngineConfig(max_model_len=2048)
    engine = await asyncio.to_thread(AsyncEngine, config)
    server = GrpcServer(engine, ServerConfig(grpc_port=0))
    await server.start()
    try:
        async with GenerateClient(server.address) as client, grpc.aio.insecure_channel(server.address) as channel:
            stub = GenerationStub(channel)  # type: ignore[no-untyped-call]
            results = await time_refusals(stub, "idle", repeats)
            busy = asyncio.create_task(generate_forever(client))
            await asyncio.sleep(1.0)
            results += await time_refusals(stub, "generating", repeats)
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)
            return results
    finally:
        await server.stop()
        await engine.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="latency of refusing bad requests over gRPC")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = asyncio.run(run(args.repeats))
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
        return
    for result in results:
        print(f"{result.load:10s} {result.case:26s} median={result.median_ms:7.2f} ms max={result.max_ms:7.2f} ms")


if __name__ == "__main__":
    main()
