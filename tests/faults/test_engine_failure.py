# SPDX-License-Identifier: Apache-2.0
import logging

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from adaflash.errors import UnavailableError
from adaflash.request import SamplingParams
from adaflash.rpc.status import RpcError
from tests.fake_engine import FakeEngine
from tests.serving import run, serving

SECRET_PROMPT = "my very private prompt"


def test_an_unexpected_error_is_internal_logged_and_tells_no_prompt(caplog):
    caplog.set_level(logging.DEBUG)

    async def scenario():
        async with serving(FakeEngine(failure=ZeroDivisionError("boom"))) as served:
            for call in (served.client.generate(SECRET_PROMPT), anext(served.client.generate_stream(SECRET_PROMPT))):
                with pytest.raises(RpcError) as error_info:
                    await call
                assert error_info.value.code == grpc.StatusCode.INTERNAL
                assert "boom" not in str(error_info.value), "what failed inside is not the client's business"
            served.engine.failure = None
            await served.client.generate("a", SamplingParams(max_tokens=1))

    run(scenario())
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert all(record.exc_info and "boom" in str(record.exc_info[1]) for record in errors)
    assert SECRET_PROMPT not in caplog.text


def test_a_refused_request_leaves_no_prompt_in_the_logs(caplog):
    caplog.set_level(logging.DEBUG)

    async def scenario():
        async with serving() as served:
            with pytest.raises(Exception, match="prompt"):
                await served.client.generate(SECRET_PROMPT * 1000)

    run(scenario())
    assert "INVALID_ARGUMENT" in caplog.text
    assert SECRET_PROMPT not in caplog.text


def test_a_failed_engine_turns_health_to_not_serving(caplog):
    async def scenario():
        async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="adaflash.v1.Generation")
            assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
            served.engine.failure = UnavailableError("the engine has stopped")
            for _ in range(2):
                with pytest.raises(UnavailableError, match="has stopped"):
                    await served.client.generate("a")
            assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING

    run(scenario())
    assert [record.levelname for record in caplog.records] == ["ERROR"], "said once"
