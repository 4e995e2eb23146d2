# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash.errors import RequestError
from adaflash.request import (
    ChatMessage,
    CompletionOutput,
    Logprob,
    RequestOutput,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
    Usage,
)
from adaflash.rpc import convert
from adaflash.rpc.pb import generate_pb2 as pb
from tests.fake_engine import FakeEngine

FINE_DECIMALS = st.integers(0, 1000).map(lambda thousandths: thousandths / 1000)

PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 128),
    temperature=FINE_DECIMALS,
    top_p=st.integers(1, 1000).map(lambda thousandths: thousandths / 1000),
    top_k=st.integers(-1, 1000),
    min_p=FINE_DECIMALS,
    repetition_penalty=st.integers(1, 2000).map(lambda thousandths: thousandths / 1000),
    presence_penalty=FINE_DECIMALS,
    frequency_penalty=FINE_DECIMALS,
    logit_bias=st.none() | st.dictionaries(st.integers(0, 999), FINE_DECIMALS, min_size=1),
    seed=st.none() | st.integers(0, 2**63 - 1),
    max_tokens=st.integers(20, 2**32 - 1),
    min_tokens=st.integers(0, 20),
    stop=st.none() | st.lists(st.text(min_size=1), min_size=1, max_size=16),
    stop_token_ids=st.lists(st.integers(0, 999)),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    skip_special_tokens=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(PARAMS)
def test_sampling_params_survive_the_wire_unchanged(params):
    data = convert.params_to_pb(params).SerializeToString()
    assert convert.params_from_pb(pb.SamplingParams.FromString(data)) == params


def test_every_sampling_param_is_on_the_wire():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == fields


def test_unset_fields_take_the_defaults():
    assert convert.params_from_pb(pb.SamplingParams()) == SamplingParams()


def test_explicit_zero_is_not_unset():
    params = convert.params_from_pb(pb.SamplingParams(temperature=0.0, logprobs=0, skip_special_tokens=False))
    assert (params.temperature, params.logprobs, params.skip_special_tokens) == (0.0, 0, False)


def test_no_token_limit_travels_as_more_than_any_context_holds():
    message = convert.params_to_pb(SamplingParams(max_tokens=None))
    assert message.max_tokens == 2**32 - 1
    assert convert.params_from_pb(message).max_tokens == 2**32 - 1


def test_a_decimal_comes_back_as_it_was_meant():
    message = pb.SamplingParams(temperature=0.7)
    assert message.temperature != 0.7
    assert convert.params_from_pb(message).temperature == 0.7


@pytest.mark.parametrize("prompt", ["text", "", [1, 2, 3], [], [ChatMessage("system", "s"), ChatMessage("user", "é")]])
def test_prompts_survive_the_wire(prompt):
    message = convert.call_to_pb(prompt, SamplingParams(), "id")
    assert convert.call_from_pb(pb.GenerateRequest.FromString(message.SerializeToString())).prompt == prompt


@pytest.mark.parametrize("prompt", [[-1], [2**32], ["a"], [1.5]])
def test_a_prompt_the_wire_cannot_carry_is_refused_by_the_client(prompt):
    with pytest.raises(RequestError, match="prompt="):
        convert.call_to_pb(prompt, SamplingParams(), None)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(top_k=2**31), "top_k"),
        (SamplingParams(max_tokens=2**32), "max_tokens"),
        (SamplingParams(stop_token_ids=[-1]), "stop_token_ids"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
    ],
)
def test_params_the_wire_cannot_carry_are_refused_by_the_client(params, field):
    with pytest.raises(RequestError, match=field):
        convert.params_to_pb(params)


def test_a_finished_output_survives_the_wire():
    logprobs = [TokenLogprobs(Logprob(5, -0.5, 1), (Logprob(5, -0.5, 1), Logprob(6, -1.5, 2)))]
    outputs = [
        CompletionOutput(0, "ab", [5], logprobs, "stop", "b"),
        CompletionOutput(1, "", [7], [], "stop", 7),
        CompletionOutput(2, "", [], [], "error", None),
    ]
    stats = SpeculationStats("fixed", 3, 12, 10, 4, 7, (1, 2))
    output = RequestOutput("id", [], outputs, Usage(3, 2, 2), stats, finished=True)
    data = convert.output_to_pb(output).SerializeToString()
    assert convert.output_from_pb(pb.GenerateResponse.FromString(data), with_logprobs=True) == output


def test_usage_travels_with_the_last_message_only():
    output = RequestOutput("id", [], [], Usage(3, 2, 2), SpeculationStats(), finished=False)
    assert not convert.output_to_pb(output).HasField("usage")
    assert convert.output_to_pb(output._replace(finished=True)).HasField("usage")


def test_server_info_survives_the_wire():
    engine = FakeEngine()
    message = convert.server_info_to_pb(engine.info, engine.stats(), "1.2.3")
    info = convert.server_info_from_pb(pb.ServerInfo.FromString(message.SerializeToString()))
    assert info == convert.ServerInfo("1.2.3", engine.info, 0, 0, 256)


def test_every_server_info_field_is_filled():
    engine = FakeEngine()
    message = convert.server_info_to_pb(dataclasses.replace(engine.info, draft="d"), engine.stats(), "1")
    filled = {field.name for field, _ in message.ListFields()}
    unfilled = {field.name for field in pb.ServerInfo.DESCRIPTOR.fields} - filled
    assert unfilled == {"num_running", "num_waiting"}, "only those that are zero"
