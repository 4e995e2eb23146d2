# SPDX-License-Identifier: Apache-2.0
"""The server around a real engine: what the fake one promises must hold for it, too."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from adaflash.config import EngineConfig, ServerConfig
from adaflash.engine.async_engine import AsyncEngine
from adaflash.engine.merge import OutputMerger
from adaflash.errors import CapacityError, RequestError
from adaflash.request import RequestOutput, SamplingParams
from adaflash.rpc.client import GenerateClient
from adaflash.rpc.server import GrpcServer
from adaflash.rpc.status import RpcError
from tests.engines import TinySetup, oracle_engine, run_all, tiny_engine
from tests.serving import eventually, run

SEEDED = SamplingParams(n=2, temperature=0.7, top_p=0.9, seed=11, max_tokens=24, logprobs=1)


@asynccontextmanager
async def real_server(
    setup: TinySetup, max_num_waiting: int = 256
) -> AsyncIterator[tuple[AsyncEngine, GenerateClient]]:
    config = EngineConfig(num_kv_blocks=256, max_num_seqs=8, num_threads=1)
    config = replace(config, model=str(setup.target), draft=str(setup.drafters["random"]), device="cpu")
    engine = AsyncEngine(config, max_num_waiting=max_num_waiting)
    async with server_around(engine) as client:
        yield engine, client


@asynccontextmanager
async def server_around(engine: AsyncEngine) -> AsyncIterator[GenerateClient]:
    server = GrpcServer(engine, ServerConfig(grpc_port=0))
    await server.start()
    try:
        async with GenerateClient(server.address) as client:
            yield client
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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_deadline_in_a_speculative_stream_leaves_a_prefix_of_plain_decoding(tiny_setup, monkeypatch, temperature):
    setup, prompt = tiny_setup("llama"), [5, 6, 7]
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=450, ignore_eos=True)
    config = EngineConfig(num_kv_blocks=64, verify_policy="fixed", num_threads=1)
    plain = tiny_engine(setup, None, replace(config, verify_policy="off"))
    expected = run_all(plain, [prompt], params)[0].outputs[0].token_ids
    engine = oracle_engine(setup, {tuple(prompt): expected}, 0.8, config)
    step, pauses = engine.step, iter([0.02] * 60)
    monkeypatch.setattr(engine, "step", lambda: (time.sleep(next(pauses, 0.0)), step())[1])

    async def scenario():
        async with server_around(AsyncEngine(config, engine=engine)) as client:
            tokens = []
            with pytest.raises(RpcError) as error_info:  # noqa: PT012 - the error ends the loop
                async for delta in client.generate_stream(prompt, params, timeout_s=1.0):
                    tokens += delta.outputs[0].token_ids
            assert error_info.value.code == grpc.StatusCode.DEADLINE_EXCEEDED
            assert 0 < len(tokens) < len(expected)
            assert tokens == expected[: len(tokens)]
            assert engine.stats().num_accepted_tokens > 0, "speculation ran"
            await eventually(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
            await eventually(lambda: engine.stats().num_free_blocks == engine.stats().num_total_blocks)
            assert engine.stats().num_finished == 1
            again = await client.generate(prompt, params)
            assert again.outputs[0].token_ids == expected
            assert again.speculation.num_accepted_tokens > 0

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
