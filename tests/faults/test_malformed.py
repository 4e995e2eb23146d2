# SPDX-License-Identifier: Apache-2.0
import asyncio
import logging
import random
from collections import Counter

import grpc
import pytest

from adaflash.rpc.pb import generate_pb2 as pb
from tests.fake_engine import FakeEngine
from tests.mutations import mutate
from tests.serving import call_raw, run, serving

GENERATE = "/adaflash.v1.Generation/Generate"
GENERATE_STREAM = "/adaflash.v1.Generation/GenerateStream"
METHODS = (
    GENERATE,
    GENERATE_STREAM,
    "/adaflash.v1.Generation/Abort",
    "/adaflash.v1.Generation/GetServerInfo",
    "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
NEVER = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
VALID = [
    pb.GenerateRequest(text="hello world", sampling_params={"max_tokens": 3, "temperature": 0.5, "stop": ["a", "é"]}),
    pb.GenerateRequest(token_ids={"ids": [1, 2, 300, 999]}, request_id="x", sampling_params={"n": 2, "seed": 2**60}),
    pb.GenerateRequest(
        chat={"messages": [{"role": "user", "content": "hi"}]},
        sampling_params={"logit_bias": {5: 1.5, 7: -2.0}, "stop_token_ids": [3, 4], "logprobs": 2},
    ),
    pb.GenerateResponse(request_id="a", outputs=[{"index": 1, "text": "b"}], finished=True),
    pb.AbortRequest(request_ids=["a", "b"]),
]


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff",
        b"\x12\x05ab",
        b"\x12\x02\xff\xfe",
        b"\x0a\x02\xc3\x28\x12\x01a",
        b"\x12\x01a\x2a\x04\x6a\x02\xff\xfe",
        b"\x0b",
        b"\x80" * 11,
    ],
    ids=["garbage", "truncated", "bad-utf8-text", "bad-utf8-id", "bad-utf8-stop", "open-group", "long-varint"],
)
def test_bytes_that_are_no_message_are_invalid_arguments(data, caplog):
    async def scenario():
        async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
            for method in METHODS[:3]:
                if method.endswith("Abort") and data != b"\xff\xff\xff":
                    continue
                assert await call_raw(channel, method, data) == grpc.StatusCode.INVALID_ARGUMENT
            assert served.engine.prompts_seen == []

    run(scenario())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_mutated_messages_never_end_as_internal_or_unknown(caplog):
    """3,000 mutations of valid messages over every method; the server stays well."""

    async def scenario():
        engine = FakeEngine(max_output_tokens=4)
        async with serving(engine) as served, grpc.aio.insecure_channel(served.address) as channel:
            rng = random.Random(20261129)
            seen: Counter[grpc.StatusCode] = Counter()

            async def fuzz(count: int) -> None:
                for _ in range(count):
                    method = rng.choice([GENERATE, GENERATE_STREAM, *METHODS])
                    is_generate = method in (GENERATE, GENERATE_STREAM)
                    data = mutate(rng, rng.choice(VALID[:3] if is_generate else VALID).SerializeToString())
                    code = await call_raw(channel, method, data)
                    assert code not in NEVER, (method, data.hex())
                    seen[code] += 1

            await asyncio.gather(*(fuzz(150) for _ in range(20)))
            assert seen[grpc.StatusCode.OK] > 200, seen
            assert seen[grpc.StatusCode.INVALID_ARGUMENT] > 1000, seen
            assert set(seen) <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}, seen
            assert engine.running == {}
            assert len(engine.prompts_seen) > 100, "mutations that stay valid must reach the engine"

    run(scenario(), timeout_s=60.0)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_an_unknown_method_is_unimplemented():
    async def scenario():
        async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
            code = await call_raw(channel, "/adaflash.v1.Generation/Nothing", b"")
            assert code == grpc.StatusCode.UNIMPLEMENTED

    run(scenario())
