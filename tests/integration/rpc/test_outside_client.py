# SPDX-License-Identifier: Apache-2.0
import asyncio
import json
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from adaflash.errors import UnavailableError
from adaflash.request import SamplingParams
from tests.fake_engine import FakeEngine
from tests.serving import eventually, run, serving

ROOT = Path(__file__).resolve().parents[3]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_client_of_another_process_lists_streams_and_cancels():
    async def scenario():
        async with serving(FakeEngine(token_delay_s=0.002)) as served:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.rpc_probe", served.address, cwd=ROOT, stdout=asyncio.subprocess.PIPE
            )
            out, _ = await process.communicate()
            assert process.returncode == 0
            seen = json.loads(out)
            assert {"adaflash.v1.Generation", "grpc.health.v1.Health"} <= set(seen["services"])
            assert seen["described_files"] == 1
            assert seen["health"] == [SERVING, SERVING]
            assert seen["streamed"] == seen["unary"] == list(range(8))
            assert seen["finished"].count(True) == 1
            assert seen["finished"][-1]
            assert seen["model"] == "fake"
            assert seen["aborted"] == []
            await eventually(lambda: not served.engine.running)
            assert served.engine.num_aborted == 1, "the cancelled stream"

    run(scenario())


def test_a_draining_server_is_not_serving_and_lets_the_running_finish():
    async def scenario():
        async with (
            serving(FakeEngine(token_delay_s=0.01)) as served,
            grpc.aio.insecure_channel(served.address) as channel,
        ):
            running = asyncio.create_task(served.client.generate("a", SamplingParams(max_tokens=50)))
            await eventually(lambda: bool(served.engine.running))
            drain = asyncio.create_task(served.server.drain())
            await asyncio.sleep(0.1)
            status = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert status.status == NOT_SERVING
            with pytest.raises(UnavailableError):
                await served.client.generate("late")
            assert not drain.done()
            assert (await running).outputs[0].finish_reason == "length"
            assert await drain

    run(scenario())


def test_health_follows_the_shutdown():
    async def scenario():
        async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="adaflash.v1.Generation"))
            assert (await watch.read()).status == SERVING
            await served.server.announce_shutdown()
            assert (await watch.read()).status == NOT_SERVING
            for name in ("", "adaflash.v1.Generation"):
                assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == NOT_SERVING
            await served.client.generate("a")  # still accepted: the balancer may not have noticed yet

    run(scenario())
