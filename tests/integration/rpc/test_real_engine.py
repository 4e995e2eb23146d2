# SPDX-License-Identifier: Apache-2.0
"""The server around a real engine: what the fake one promises must hold for it, too."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from adaflash.config import EngineConfig, ServerConfig
from adaflash.engine.async_engine import AsyncEngine
from adaflash.engine.merge import OutputMerger
from adaflash.errors import CapacityError, RequestError
from adaflash.request import RequestOutput, SamplingParams
from adaflash.rpc.client import GenerateClient
from adaflash.rpc.server import GrpcServer
from tests.engines import TinySetup
from tests.serving import run

SEEDED = SamplingParams(n=2, temperature=0.7, top_p=0.9, seed=11, max_tokens=24, logprobs=1)


@asynccontextmanager
async def real_server(
    setup: TinySetup, max_num_waiting: int = 256
) -> AsyncIterator[tuple[AsyncEngine, GenerateClient]]:
    config = EngineConfig(num_kv_blocks=256, max_num_seqs=8, num_threads=1)
    config = replace(config, model=str(setup.target), draft=str(setup.drafters["random"]), device="cpu")
    engine = AsyncEngine(config, max_num_waiting=max_num_waiting)
    server = GrpcServer(engine, ServerConfig(grpc_port=0))
    await server.start()
    try:
        async with GenerateClient(server.address) as client:
            yield engine, client
    finally:
        await server.stop()
        await engine.close()


async def _collect(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    merger = OutputMerger()
    async for delta in stream:
        merger.add(delta)
    return merger.result()


def test_a_seeded_request_is_the_same_in_process_and_over_grpc(tiny_setup):
    async def scenario():
        async with real_server(tiny_setup("llama")) as (engine, client):
            inside = await _collect(engine.generate([5, 6, 7], SEEDED))
            streamed = await _collect(client.generate_stream([5, 6, 7], SEEDED))
            unary = await client.generate([5, 6, 7], SEEDED)
            expected = [output.token_ids for output in inside.outputs]
            assert expected[0] != expected[1]
            assert [output.token_ids for output in streamed.outputs] == expected
            assert [output.token_ids for output in unary.outputs] == expected
            assert unary.speculation.num_verified_tokens > 0, "speculation ran"
            assert unary.usage == inside.usage

    run(scenario(), timeout_s=60)


def test_disconnects_leak_no_request_and_no_kv_block(tiny_setup):
    async def scenario():
        async with real_server(tiny_setup("llama")) as (engine, client):
            rng = random.Random(3)

            async def one(index: int) -> None:
                params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.0)
                stream = client.generate_stream([index % 90 + 3] * 20, params, request_id=f"r{index}")
                try:
                    for _ in range(rng.randint(1, 4)):
                        await anext(stream)
                    if index % 2:
                        assert await client.abort(f"r{index}") == [f"r{index}"]
                finally:
                    await stream.aclose()

            await asyncio.gather(*(one(index) for index in range(40)))
            loop = asyncio.get_running_loop()
            deadline = loop.time() + 5
            while engine.stats().num_free_blocks < engine.stats().num_total_blocks:
                assert loop.time() < deadline, engine.stats()
                await asyncio.sleep(0.01)
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            reply = await client.generate([5], SamplingParams(max_tokens=4, ignore_eos=True))
            assert len(reply.outputs[0].token_ids) == 4

    run(scenario(), timeout_s=60)


def test_without_a_token_limit_a_server_generates_to_its_context_limit(tiny_setup):
    async def scenario():
        async with real_server(tiny_setup("llama")) as (engine, client):
            reply = await client.generate([5] * 500, SamplingParams(max_tokens=None, ignore_eos=True))
            assert len(reply.outputs[0].token_ids) == engine.info.max_model_len - 500
            assert len((await client.generate([5], SamplingParams(ignore_eos=True))).outputs[0].token_ids) == 16

    run(scenario(), timeout_s=60)


def test_overload_is_refused_and_bad_ids_leave_the_engine_well(tiny_setup):
    async def scenario():
        async with real_server(tiny_setup("llama"), max_num_waiting=2) as (_, client):
            params = SamplingParams(max_tokens=30, ignore_eos=True)
            calls = [client.generate([5, 6], params) for _ in range(40)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            refused = [result for result in results if isinstance(result, CapacityError)]
            finished = [result for result in results if isinstance(result, RequestOutput)]
            assert len(refused) + len(finished) == 40
            assert len(finished) >= 10
            assert refused
            assert all(error.retry_after_s > 0 for error in refused)
            with pytest.raises(RequestError, match="stop_token_ids=97"):
                await client.generate([5], SamplingParams(stop_token_ids=[97]))
            with pytest.raises(RequestError, match="prompt_token_ids=4294967295"):
                await client.generate([2**32 - 1])
            assert len((await client.generate([5], params)).outputs[0].token_ids) == 30

    run(scenario(), timeout_s=60)
