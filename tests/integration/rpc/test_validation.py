# SPDX-License-Identifier: Apache-2.0
import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from adaflash.rpc.pb import generate_pb2 as pb
from adaflash.rpc.pb import generate_pb2_grpc
from tests.serving import run, serving

NAN, INF = float("nan"), float("inf")
BAD_PARAMS = [
    ("n", 0),
    ("n", 129),
    ("temperature", -0.5),
    ("temperature", NAN),
    ("temperature", INF),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_p", NAN),
    ("top_k", -2),
    ("min_p", 1.5),
    ("repetition_penalty", 0.0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -INF),
    ("seed", 2**63),
    ("max_tokens", 0),
    ("min_tokens", 17),
    ("logprobs", 21),
    ("stop", [""]),
    ("stop", ["x"] * 17),
    ("stop_token_ids", [1000]),
    ("stop_token_ids", [2**32 - 1]),
    ("logit_bias", {1000: 1.0}),
    ("logit_bias", {2**32 - 1: 1.0}),
    ("logit_bias", {5: 101.0}),
    ("logit_bias", {5: NAN}),
]


def _unknown_field(number: int) -> bytes:
    return bytes([number << 3, 1]) if number < 16 else bytes([(number << 3) & 0x7F | 0x80, number >> 4, 1])


def _with_unknown(message, number=90):
    return type(message).FromString(message.SerializeToString() + _unknown_field(number))


def _nested(field: str, message) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text="a")
    getattr(request, field).CopyFrom(message)
    return request


GOOD = pb.SamplingParams(max_tokens=1)
BAD_REQUESTS = [
    ("prompt", pb.GenerateRequest(sampling_params=GOOD)),
    ("prompt_token_ids", pb.GenerateRequest(text="")),
    ("prompt_token_ids", pb.GenerateRequest(token_ids=pb.TokenIds())),
    ("prompt_token_ids", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1000]))),
    ("prompt_token_ids", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1]))),
    ("prompt length", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 4096))),
    ("chat.messages", pb.GenerateRequest(chat=pb.Chat())),
    ("chat.messages[1].role", pb.GenerateRequest(chat=pb.Chat(messages=[{"role": "user"}, {"content": "x"}]))),
    ("request_id", pb.GenerateRequest(text="a", request_id="x" * 257)),
    ("field 90 of adaflash.v1.GenerateRequest", _with_unknown(pb.GenerateRequest(text="a"))),
    (
        "sampling_params.field 90 of adaflash.v1.SamplingParams",
        _nested("sampling_params", _with_unknown(pb.SamplingParams(max_tokens=1))),
    ),
    (
        "chat.messages.field 90 of adaflash.v1.ChatMessage",
        _nested("chat", pb.Chat(messages=[_with_unknown(pb.ChatMessage(role="user"))])),
    ),
]


def _params(name: str, value) -> pb.SamplingParams:
    message = pb.SamplingParams(max_tokens=16)
    if isinstance(value, dict):
        for key, item in value.items():
            getattr(message, name)[key] = item
    elif isinstance(value, list):
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)
    return message


async def _violated_field(call) -> str:
    """Return the field that an INVALID_ARGUMENT names in its details."""
    with pytest.raises(grpc.aio.AioRpcError) as error_info:
        await call
    error = error_info.value
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error.details()
    (detail,) = rpc_status.from_call(error).details
    violation = error_details_pb2.BadRequest()
    assert detail.Unpack(violation)
    (field,) = [entry.field for entry in violation.field_violations]
    assert error.details().startswith(f"{field}="), "the message names the field, too"
    return field


def test_every_bad_value_is_refused_by_the_name_of_its_field():
    async def scenario():
        async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
            stub = generate_pb2_grpc.GenerationStub(channel)
            for name, value in BAD_PARAMS:
                request = pb.GenerateRequest(text="a", sampling_params=_params(name, value))
                assert await _violated_field(stub.Generate(request)) == name, (name, value)
                assert await _violated_field(stub.GenerateStream(request).read()) == name, (name, value)
            assert served.engine.prompts_seen == [], "the engine was not touched"
            await stub.Generate(pb.GenerateRequest(text="a", sampling_params=GOOD))

    run(scenario())


@pytest.mark.parametrize(("field", "request_message"), BAD_REQUESTS)
def test_a_bad_request_is_refused_by_the_name_of_its_field(field, request_message):
    async def scenario():
        async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
            stub = generate_pb2_grpc.GenerationStub(channel)
            assert await _violated_field(stub.Generate(request_message)) == field
            assert served.engine.prompts_seen == []

    run(scenario())


def test_an_oversized_request_is_refused():
    async def scenario():
        async with serving(max_message_bytes=1000) as served, grpc.aio.insecure_channel(served.address) as channel:
            stub = generate_pb2_grpc.GenerationStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as error_info:
                await stub.Generate(pb.GenerateRequest(text="a" * 1001))
            assert error_info.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            await stub.Generate(pb.GenerateRequest(text="a" * 500, sampling_params=GOOD))

    run(scenario())
