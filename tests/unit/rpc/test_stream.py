# SPDX-License-Identifier: Apache-2.0
from adaflash.engine.merge import OutputMerger
from adaflash.request import CompletionOutput, Logprob, RequestOutput, SpeculationStats, TokenLogprobs, Usage
from adaflash.rpc.convert import output_from_pb
from adaflash.rpc.stream import split_output


def _output(num_samples: int, num_tokens: int) -> RequestOutput:
    tokens = list(range(num_tokens))
    logprobs = [TokenLogprobs(Logprob(token, -0.5, 1), (Logprob(token, -0.5, 1),)) for token in tokens]
    outputs = [
        CompletionOutput(index, "é" * 3 * num_tokens, tokens, logprobs, "stop", "é") for index in range(num_samples)
    ]
    stats = SpeculationStats("fixed", 2, 4, 3, 2, 4, (1,))
    return RequestOutput("id", [], outputs, Usage(1, 0, num_tokens * num_samples), stats, finished=True)


def test_a_big_delta_is_split_and_adds_up_to_itself():
    output = _output(num_samples=3, num_tokens=500)
    messages = list(split_output(output, max_bytes=2000))
    assert len(messages) > 10
    assert max(message.ByteSize() for message in messages) <= 2000
    merger = OutputMerger()
    for message in messages:
        merger.add(output_from_pb(message, with_logprobs=True))
    assert merger.result() == output


def test_only_the_last_part_ends_the_stream():
    messages = list(split_output(_output(num_samples=2, num_tokens=100), max_bytes=1000))
    assert [message.finished for message in messages] == [False] * (len(messages) - 1) + [True]
    assert [message.HasField("usage") for message in messages].count(True) == 1
    reasons = [completion.index for message in messages for completion in message.outputs if completion.finish_reason]
    assert reasons == [0, 1]


def test_a_delta_within_the_limit_is_one_message():
    assert len(list(split_output(_output(num_samples=1, num_tokens=2), max_bytes=64 * 1024))) == 1


def test_one_token_bigger_than_the_limit_is_still_delivered():
    messages = list(split_output(_output(num_samples=1, num_tokens=1), max_bytes=1))
    assert "".join(completion.text for message in messages for completion in message.outputs) == "ééé"
    assert sum(len(completion.token_ids) for message in messages for completion in message.outputs) == 1
