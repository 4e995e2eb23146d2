# SPDX-License-Identifier: Apache-2.0
import asyncio

import grpc
import pytest

from adaflash.errors import RequestError
from adaflash.request import ChatMessage, SamplingParams
from adaflash.rpc.client import SyncGenerateClient
from adaflash.rpc.pb import generate_pb2 as pb
from adaflash.rpc.pb import generate_pb2_grpc
from tests.fake_engine import FakeEngine
from tests.serving import eventually, run, serving

PARAMS = SamplingParams(n=2, max_tokens=20, temperature=0.7, top_p=0.9, seed=5, logprobs=1, stop=["x"], min_tokens=3)


def test_a_unary_reply_is_the_sum_of_the_stream():
    async def scenario():
        async with serving() as served:
            reply = await served.client.generate("hello", PARAMS)
            texts, token_ids, logprobs = {0: "", 1: ""}, {0: [], 1: []}, {0: [], 1: []}
            num_messages = 0
            async for delta in served.client.generate_stream("hello", PARAMS):
                num_messages += 1
                for output in delta.outputs:
                    texts[output.index] += output.text
                    token_ids[output.index] += output.token_ids
                    logprobs[output.index] += output.logprobs
            assert num_messages > 1
            assert delta.finished
            assert [output.text for output in reply.outputs] == list(texts.values())
            assert [output.token_ids for output in reply.outputs] == [list(range(20))] * 2 == list(token_ids.values())
            assert [output.logprobs for output in reply.outputs] == list(logprobs.values())
            assert [output.finish_reason for output in reply.outputs] == ["length", "length"]
            assert reply.usage == delta.usage
            assert reply.usage.num_output_tokens == 40
            assert reply.speculation == delta.speculation
            assert reply.speculation.num_emitted_tokens == 20

    run(scenario())


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], [ChatMessage("system", "be brief"), ChatMessage("user", "hi")]])
def test_prompt_and_params_reach_the_engine_as_they_were(prompt):
    async def scenario():
        async with serving() as served:
            await served.client.generate(prompt, PARAMS)
            assert served.engine.prompts_seen == [prompt]
            assert served.engine.params_seen == [PARAMS]

    run(scenario())


def test_request_ids_are_kept_or_chosen():
    async def scenario():
        async with serving() as served:
            assert (await served.client.generate("a", request_id="mine")).request_id == "mine"
            first, second = await served.client.generate("a"), await served.client.generate("a")
            assert first.request_id
            assert first.request_id != second.request_id

    run(scenario())


def test_a_request_id_in_use_is_refused_and_free_again_afterwards():
    async def scenario():
        async with serving(FakeEngine(token_delay_s=0.01)) as served:
            stream = served.client.generate_stream("a", SamplingParams(max_tokens=10), request_id="same")
            await anext(stream)
            with pytest.raises(RequestError, match="request_id='same'"):
                await served.client.generate("a", request_id="same")
            async for _ in stream:
                pass
            await served.client.generate("a", request_id="same")

    run(scenario())


def test_abort_ends_the_stream_with_its_reason():
    async def scenario():
        async with serving(FakeEngine(token_delay_s=0.01)) as served:
            stream = served.client.generate_stream("a", SamplingParams(max_tokens=4000), request_id="long")
            await anext(stream)
            assert await served.client.abort("long", "unknown") == ["long"]
            last = [delta async for delta in stream][-1]
            assert last.finished
            assert last.outputs[0].finish_reason == "abort"
            assert await served.client.abort("long") == []
            assert served.engine.running == {}

    run(scenario())


def test_closing_a_stream_aborts_its_request():
    async def scenario():
        async with serving(FakeEngine(token_delay_s=0.01)) as served:
            stream = served.client.generate_stream("a", SamplingParams(max_tokens=4000))
            await anext(stream)
            assert len(served.engine.running) == 1
            await stream.aclose()
            assert await eventually(lambda: not served.engine.running) < 0.5
            assert served.engine.num_aborted == 1

    run(scenario())


def test_cancelling_a_unary_call_aborts_its_request():
    async def scenario():
        async with serving(FakeEngine(token_delay_s=0.01)) as served:
            task = asyncio.create_task(served.client.generate("a", SamplingParams(max_tokens=4000)))
            await eventually(lambda: bool(served.engine.running))
            task.cancel()
            await eventually(lambda: not served.engine.running)
            assert served.engine.num_aborted == 1

    run(scenario())


def test_server_info_tells_what_is_served():
    async def scenario():
        async with serving(served_model_name="public-name") as served:
            info = await served.client.server_info()
            assert info.engine.model == "public-name"
            assert info.engine.op_table == served.engine.info.op_table
            assert info.num_free_kv_blocks == 256

    run(scenario())


def test_no_message_of_a_stream_is_larger_than_the_limit():
    async def scenario():
        engine = FakeEngine(token_text="word" * 50)
        async with (
            serving(engine, max_stream_buffer_bytes=1024) as served,
            grpc.aio.insecure_channel(served.address) as channel,
        ):
            stub = generate_pb2_grpc.GenerationStub(channel)
            params = pb.SamplingParams(max_tokens=100, n=3)
            sizes, text = [], ""
            async for message in stub.GenerateStream(pb.GenerateRequest(text="a", sampling_params=params)):
                sizes.append(message.ByteSize())
                text += "".join(output.text for output in message.outputs if output.index == 0)
            assert max(sizes) <= 1024
            assert text == "".join(f"{'word' * 50}{token}" for token in range(100))

    run(scenario())


def test_the_synchronous_client_does_the_same():
    async def scenario():
        async with serving(FakeEngine(token_delay_s=0.002)) as served:
            await asyncio.to_thread(_use_sync_client, served.address)
            await eventually(lambda: not served.engine.running)

    run(scenario())


def _use_sync_client(address: str) -> None:
    with SyncGenerateClient(address) as client:
        reply = client.generate("a", SamplingParams(max_tokens=3))
        assert reply.outputs[0].token_ids == [0, 1, 2]
        deltas = list(client.generate_stream("a", SamplingParams(max_tokens=3)))
        assert [token for delta in deltas for token in delta.outputs[0].token_ids] == [0, 1, 2]
        assert client.server_info().engine.vocab_size == 1000
        stream = client.generate_stream("a", SamplingParams(max_tokens=4000), request_id="r")
        next(stream)
        assert client.abort("r") == ["r"]
        stream.close()
        with pytest.raises(RequestError, match="prompt_token_ids"):
            client.generate([])
