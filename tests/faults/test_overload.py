# SPDX-License-Identifier: Apache-2.0
import asyncio
import itertools
import logging

import grpc
import pytest

from adaflash.errors import CapacityError
from adaflash.request import SamplingParams
from adaflash.rpc.pb import generate_pb2 as pb
from adaflash.rpc.pb import generate_pb2_grpc
from adaflash.rpc.status import StreamStalledError, code_of
from tests.fake_engine import FakeEngine
from tests.serving import eventually, run, serving


def test_overload_is_refused_with_a_retry_hint_and_loses_no_accepted_request():
    async def scenario():
        engine = FakeEngine(max_num_requests=8, tokens_before_gate=0)
        async with serving(engine) as served:
            params = SamplingParams(max_tokens=30)

            async def one():
                try:
                    return await served.client.generate("a", params)
                except CapacityError as error:
                    return error

            replies = asyncio.as_completed([asyncio.create_task(one()) for _ in range(80)])
            refused = [await reply for reply in itertools.islice(replies, 72)]  # The gate lets nothing finish yet.
            assert {(type(error), error.retry_after_s) for error in refused} == {(CapacityError, 0.25)}
            assert len(engine.running) == 8
            engine.gate.set()
            finished = [await reply for reply in replies]
            assert len(finished) == engine.num_finished == 8
            assert all(output.outputs[0].token_ids == list(range(30)) for output in finished)
            await served.client.generate("a", params)

    run(scenario())


def test_a_refused_id_can_be_tried_again():
    async def scenario():
        async with serving(FakeEngine(token_delay_s=0.01, max_num_requests=1)) as served:
            first = asyncio.create_task(served.client.generate("a", SamplingParams(max_tokens=10)))
            await eventually(lambda: bool(served.engine.running))
            with pytest.raises(CapacityError):
                await served.client.generate("a", request_id="again")
            await first
            assert (await served.client.generate("a", request_id="again")).request_id == "again"

    run(scenario())


def test_a_client_that_reads_nothing_is_cut_and_disturbs_nobody():
    async def scenario():
        # 100 KB a token overrun the client's receive window after some tens of tokens.
        engine = FakeEngine(token_delay_s=0.005, token_text="x" * 100_000)
        async with (
            serving(engine, stream_stall_timeout_s=0.3) as served,
            grpc.aio.insecure_channel(served.address) as channel,
        ):
            stub = generate_pb2_grpc.GenerationStub(channel)
            request = pb.GenerateRequest(text="a", request_id="stalled", sampling_params={"max_tokens": 4000})
            stalled = stub.GenerateStream(request)
            await stalled.read()
            assert "stalled" in engine.running
            reply = await served.client.generate("a", SamplingParams(max_tokens=10), timeout_s=2.0)
            assert len(reply.outputs[0].token_ids) == 10
            waited = await eventually(lambda: "stalled" not in engine.running, timeout_s=10.0)
            assert waited > 0.1
            assert engine.num_aborted == 1
            with pytest.raises(grpc.aio.AioRpcError) as error_info:
                await _read_to_the_end(stalled)
            assert error_info.value.code() == code_of(StreamStalledError("")) == grpc.StatusCode.ABORTED
            assert "read nothing for 0.3 s" in error_info.value.details()

    run(scenario())


def test_a_client_that_is_cut_and_leaves_without_reading_on_is_no_error(caplog):
    async def scenario():
        engine = FakeEngine(token_delay_s=0.005, token_text="x" * 100_000)
        async with (
            serving(engine, stream_stall_timeout_s=0.2) as served,
            grpc.aio.insecure_channel(served.address) as channel,
        ):
            stub = generate_pb2_grpc.GenerationStub(channel)
            stalled = stub.GenerateStream(pb.GenerateRequest(text="a", sampling_params={"max_tokens": 4000}))
            await stalled.read()
            await eventually(lambda: not engine.running, timeout_s=10.0)
            assert engine.num_aborted == 1
            stalled.cancel()
            await served.client.server_info()
            await asyncio.sleep(0.1)

    run(scenario())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def _read_to_the_end(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def test_a_client_slower_than_the_engine_gets_everything_in_fewer_messages():
    async def scenario():
        # 20 MB, of which a client's receive window takes some 6 MB: 300 messages of one token.
        engine = FakeEngine(token_text="x" * 20_000)
        async with serving(engine, max_stream_buffer_bytes=10**7, stream_stall_timeout_s=1000.0) as served:
            stream = served.client.generate_stream("a", SamplingParams(max_tokens=1000))
            deltas = [await anext(stream)]
            (request,) = engine.running.values()
            await request.ended.wait()
            deltas += [delta async for delta in stream]
            assert [token for delta in deltas for token in delta.outputs[0].token_ids] == list(range(1000))
            assert len(deltas) < 900, "what could not be sent was merged"
            assert [delta.finished for delta in deltas[-2:]] == [False, True]

    run(scenario())
