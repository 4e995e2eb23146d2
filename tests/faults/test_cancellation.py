# SPDX-License-Identifier: Apache-2.0
import asyncio
import logging
import random
import sys

import grpc
import pytest

from adaflash.request import SamplingParams
from adaflash.rpc.client import GenerateClient
from adaflash.rpc.pb import generate_pb2 as pb
from adaflash.rpc.pb import generate_pb2_grpc
from adaflash.rpc.status import RpcError
from tests.fake_engine import FakeEngine
from tests.serving import eventually, run, serving

STEP_S = 0.01
LONG = SamplingParams(max_tokens=4000)


@pytest.mark.parametrize("timeout_s", [0.001, 0.02, 0.1, 0.4])
def test_a_deadline_ends_the_call_and_aborts_the_request(timeout_s):
    async def scenario():
        async with serving(FakeEngine(token_delay_s=STEP_S)) as served:
            loop = asyncio.get_running_loop()
            started = loop.time()
            with pytest.raises(RpcError) as error_info:
                async for _ in served.client.generate_stream("a", LONG, timeout_s=timeout_s):
                    pass
            assert error_info.value.code == grpc.StatusCode.DEADLINE_EXCEEDED
            assert loop.time() - started < timeout_s + 0.5
            assert await eventually(lambda: not served.engine.running) < 0.5
            await served.client.generate("a", SamplingParams(max_tokens=1))

    run(scenario())


def test_a_deadline_ends_a_unary_call_too():
    async def scenario():
        async with serving(FakeEngine(token_delay_s=STEP_S)) as served:
            with pytest.raises(RpcError) as error_info:
                await served.client.generate("a", LONG, timeout_s=0.1)
            assert error_info.value.code == grpc.StatusCode.DEADLINE_EXCEEDED
            await eventually(lambda: not served.engine.running)
            assert served.engine.num_aborted == 1

    run(scenario())


def test_a_storm_of_disconnects_leaks_no_request(caplog):
    """300 streams end at random points: by Abort, by cancel, by deadline, or with the whole connection."""

    async def scenario():
        engine = FakeEngine(token_delay_s=0.005)
        async with serving(engine) as served:
            rng = random.Random(7)
            limit = asyncio.Semaphore(60)

            async def one(index: int) -> None:
                async with limit:
                    await _end_somehow(served, f"request-{index}", index % 4, rng.random() * 0.1)

            await asyncio.gather(*(one(index) for index in range(300)))
            assert await eventually(lambda: not engine.running) < 1.0
            assert engine.num_aborted > 150, "the storm must hit running requests"
            reply = await served.client.generate("a", SamplingParams(max_tokens=5))
            assert reply.outputs[0].token_ids == list(range(5))

    run(scenario())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def _end_somehow(served, request_id: str, way: int, delay_s: float) -> None:
    request = pb.GenerateRequest(text="a", request_id=request_id, sampling_params=pb.SamplingParams(max_tokens=4000))
    async with GenerateClient(served.address) as own_connection:
        client = own_connection if way == 3 else served.client
        call = client._stub.GenerateStream(request, timeout=5 * delay_s if way == 2 else None)
        first = asyncio.Event()
        reader = asyncio.create_task(_read_all(call, first))
        if delay_s > 0.03:
            await first.wait()  # the others may end before the server has seen them
        await asyncio.sleep(delay_s)
        if way == 0:
            while not await served.client.abort(request_id):
                await asyncio.sleep(0.005)
        elif way == 1:
            call.cancel()
        elif way == 3:
            await own_connection.close()
        await reader


async def _read_all(call, first: asyncio.Event) -> None:
    try:
        async for _ in call:
            first.set()
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        assert call.done()
    finally:
        first.set()


def test_a_killed_client_process_aborts_its_requests():
    code = (
        "import sys, grpc\n"
        "from adaflash.rpc.pb import generate_pb2 as pb, generate_pb2_grpc\n"
        "stub = generate_pb2_grpc.GenerationStub(grpc.insecure_channel(sys.argv[1]))\n"
        "for _ in stub.GenerateStream(pb.GenerateRequest(text='a', sampling_params={'max_tokens': 4000})): pass\n"
    )

    async def scenario():
        async with serving(FakeEngine(token_delay_s=STEP_S)) as served:
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, served.address)
            await eventually(lambda: bool(served.engine.running), timeout_s=15.0)
            process.kill()
            await process.wait()
            assert await eventually(lambda: not served.engine.running) < 1.0

    run(scenario())


def test_stopping_the_server_aborts_what_runs():
    async def scenario():
        # One token: gRPC tells a client how a call ended only after it has read all that came before.
        async with serving(FakeEngine(tokens_before_gate=1)) as served:
            channel = grpc.aio.insecure_channel(served.address)
            stub = generate_pb2_grpc.GenerationStub(channel)
            call = stub.GenerateStream(pb.GenerateRequest(text="a", sampling_params={"max_tokens": 4000}))
            await call.read()
            await served.server.stop()
            assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            await eventually(lambda: not served.engine.running)
            assert served.engine.num_aborted == 1
            await channel.close()

    run(scenario())
