# SPDX-License-Identifier: Apache-2.0
import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from adaflash.errors import UnavailableError
from adaflash.request import RequestOutput, SamplingParams
from adaflash.rpc.client import GenerateClient
from tests.serving import run

ROOT = Path(__file__).resolve().parents[2]
TOKEN_DELAY_S = 0.02
HALF_A_SECOND = SamplingParams(max_tokens=25)


@dataclass
class Process:
    """A server in a process of its own."""

    process: asyncio.subprocess.Process
    address: str

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)


@asynccontextmanager
async def server_process(**config: Any) -> AsyncIterator[Process]:
    command = [sys.executable, "-m", "tests.serve_fake", str(TOKEN_DELAY_S), json.dumps(config)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        ready = (await process.stdout.readline()).decode()
        assert ready.startswith("ready address="), ready
        yield Process(process, ready.split()[1].partition("=")[2])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _health(channel: grpc.aio.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service="adaflash.v1.Generation"))).status


async def _started(client: GenerateClient, params: SamplingParams, count: int) -> list[asyncio.Task[RequestOutput]]:
    """Start streams and wait until each has had a token; their results are the last deltas."""
    first = [asyncio.Event() for _ in range(count)]

    async def one(event: asyncio.Event) -> RequestOutput:
        tokens: list[int] = []
        async for delta in client.generate_stream("a", params):
            tokens += delta.outputs[0].token_ids
            event.set()
        assert tokens == list(range(len(tokens)))
        assert delta.usage.num_output_tokens == len(tokens)
        return delta

    tasks = [asyncio.create_task(one(event)) for event in first]
    await asyncio.gather(*(event.wait() for event in first))
    return tasks


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_lets_running_requests_finish_and_exits_with_0(number):
    async def scenario():
        async with (
            server_process() as server,
            GenerateClient(server.address) as client,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            assert await _health(channel) == health_pb2.HealthCheckResponse.SERVING
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()  # a balancer that watches for ever must not hold the exit up
            running = await _started(client, HALF_A_SECOND, count=20)
            server.signal(number)
            await asyncio.sleep(0.1)
            assert await _health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(UnavailableError, match="shutting down"):
                await client.generate("late")
            results = await asyncio.gather(*running)
            assert [result.outputs[0].finish_reason for result in results] == ["length"] * 20
            assert await asyncio.wait_for(server.process.wait(), 30) == 0

    run(scenario())


def test_calls_are_accepted_in_the_grace_period_and_refused_after_it():
    async def scenario():
        async with (
            server_process(shutdown_grace_period_s=0.6) as server,
            GenerateClient(server.address) as client,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            await client.generate("a", SamplingParams(max_tokens=1))
            await _health(channel)
            server.signal()
            await asyncio.sleep(0.1)
            assert await _health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
            reply = await client.generate("late but in time", SamplingParams(max_tokens=2))
            assert reply.outputs[0].finish_reason == "length"
            running = await _started(client, SamplingParams(max_tokens=60), count=1)
            await asyncio.sleep(0.6)
            with pytest.raises(UnavailableError):
                await client.generate("too late")
            assert (await running[0]).outputs[0].finish_reason == "length"
            assert await asyncio.wait_for(server.process.wait(), 30) == 0

    run(scenario())


def test_what_outlives_the_timeout_is_aborted_and_the_exit_code_is_still_0():
    async def scenario():
        async with server_process(shutdown_timeout_s=0.3) as server, GenerateClient(server.address) as client:
            running = await _started(client, SamplingParams(max_tokens=4000), count=3)
            server.signal()
            results = await asyncio.wait_for(asyncio.gather(*running), 30)
            assert [result.outputs[0].finish_reason for result in results] == ["abort"] * 3
            assert await asyncio.wait_for(server.process.wait(), 30) == 0

    run(scenario())


def test_a_second_signal_ends_everything_at_once():
    async def scenario():
        async with server_process() as server, GenerateClient(server.address) as client:
            running = await _started(client, SamplingParams(max_tokens=4000), count=3)
            server.signal()
            await asyncio.sleep(0.1)
            assert server.process.returncode is None, "the first signal waits for the running requests"
            server.signal()
            # A drained server ends with 0; how long a loaded machine takes to end a process says nothing.
            assert await asyncio.wait_for(server.process.wait(), 30) == 128 + signal.SIGTERM
            results = await asyncio.gather(*running, return_exceptions=True)
            assert all(isinstance(result, Exception) for result in results)

    run(scenario())


@pytest.mark.parametrize("field", ["grpc_port", "metrics_port"])
def test_a_port_in_use_ends_the_start_before_anything_is_loaded(field):
    async def scenario():
        with socket.create_server(("127.0.0.1", 0)) as occupied:
            port = occupied.getsockname()[1]
            code = (
                "import sys\nfrom adaflash.cli import main, serve\n"
                "serve._load = lambda engine_config, server_config: sys.exit('loaded')\n"
                "sys.exit(main.main(['serve', '--grpc-port', '0', *sys.argv[1:]]))"
            )
            flag = "--" + field.replace("_", "-")
            command = [sys.executable, "-c", code, flag, str(port)]
            process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
            _, err = await asyncio.wait_for(process.communicate(), 15)
            assert process.returncode == 2
            assert f"{field}={port} is invalid: must be a port that is free on 127.0.0.1" in err.decode()
            assert "Traceback" not in err.decode()

    run(scenario())
