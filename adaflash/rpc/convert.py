# SPDX-License-Identifier: Apache-2.0
"""The only place where protobuf messages become dataclasses and dataclasses become protobuf messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from adaflash.errors import RequestError
from adaflash.request import (
    ChatMessage,
    CompletionOutput,
    EngineInfo,
    EngineStats,
    FinishReason,
    Logprob,
    Prompt,
    RequestOutput,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
    Usage,
)
from adaflash.rpc.pb import generate_pb2 as pb

MAX_REQUEST_ID_CHARS = 256
# More than any context holds: what no limit is on the wire, where an unset field means the default.
UNLIMITED_TOKENS = 2**32 - 1

_FLOAT_FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_OPTIONAL_FIELDS = (
    "n",
    "top_k",
    "seed",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "skip_special_tokens",
    "allow_training",
    "max_inter_token_ms",
)
_FINISH_REASONS: dict[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "error": pb.FINISH_REASON_ERROR,
}
_FINISH_REASON_NAMES = {number: name for name, number in _FINISH_REASONS.items()}
_INFO_TEXT_FIELDS = ("model", "device", "dtype", "verify_policy", "sampling_coupling")
_INFO_INT_FIELDS = (
    "vocab_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_kv_blocks",
)


class GenerateCall(NamedTuple):
    """A validated request as the engine takes it; `request_id` is empty when the server is to choose one."""

    request_id: str
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class ServerInfo:
    """What a server serves, and how busy it is.

    Attributes:
        version: Version of the server's package.
        engine: What is loaded and active.
    """

    version: str
    engine: EngineInfo
    num_running: int
    num_waiting: int
    num_free_kv_blocks: int


def float_from_wire(value: float) -> float:
    """Return the decimal that was meant: 0.7 arrives as 0.699999988079071, the nearest 32-bit float.

    A request is then sampled with the same numbers in process and over gRPC.
    """
    return float(f"{value:.7g}")


def call_from_pb(message: pb.GenerateRequest) -> GenerateCall:
    """Return the request in `message`; fields that are not set take the defaults of SamplingParams.

    Raises:
        RequestError: A field is invalid or the prompt is missing; names the field.
    """
    if len(message.request_id) > MAX_REQUEST_ID_CHARS:
        raise RequestError("request_id", message.request_id, f"at most {MAX_REQUEST_ID_CHARS} characters")
    return GenerateCall(message.request_id, _prompt_from_pb(message), params_from_pb(message.sampling_params))


def _prompt_from_pb(message: pb.GenerateRequest) -> Prompt:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return message.text
    if kind == "token_ids":
        return list(message.token_ids.ids)
    if kind == "chat":
        messages = [ChatMessage(turn.role, turn.content) for turn in message.chat.messages]
        if not messages:
            raise RequestError("chat.messages", messages, "at least one message")
        for index, turn in enumerate(messages):
            if not turn.role:
                raise RequestError(f"chat.messages[{index}].role", turn.role, "a role, e.g. user")
        return messages
    raise RequestError("prompt", None, "one of text, token_ids, chat")


def params_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Return validated sampling parameters; raises RequestError naming the first invalid field."""
    values: dict[str, object] = {
        "logit_bias": {token_id: float_from_wire(bias) for token_id, bias in message.logit_bias.items()} or None,
        "stop": list(message.stop) or None,
        "stop_token_ids": list(message.stop_token_ids),
        "include_stop_str_in_output": message.include_stop_str_in_output,
        "ignore_eos": message.ignore_eos,
    }
    values.update({name: getattr(message, name) for name in _OPTIONAL_FIELDS if message.HasField(name)})
    values.update({name: float_from_wire(getattr(message, name)) for name in _FLOAT_FIELDS if message.HasField(name)})
    return SamplingParams(**values)  # type: ignore[arg-type]  # the fields validate themselves


def call_to_pb(prompt: Prompt, params: SamplingParams, request_id: str | None) -> pb.GenerateRequest:
    """Return the message for a request."""
    message = pb.GenerateRequest(request_id=request_id or "", sampling_params=params_to_pb(params))
    if isinstance(prompt, str):
        message.text = prompt
    elif prompt and isinstance(prompt[0], ChatMessage):
        turns = [turn for turn in prompt if isinstance(turn, ChatMessage)]
        assert len(turns) == len(prompt), "a prompt is all messages or all token ids"
        message.chat.messages.extend(pb.ChatMessage(role=turn.role, content=turn.content) for turn in turns)
    else:
        message.token_ids.SetInParent()
        try:
            message.token_ids.ids.extend(prompt)  # type: ignore[arg-type]  # checked at run time
        except (TypeError, ValueError) as error:
            raise RequestError("prompt", prompt, "text, chat messages, or token ids >= 0") from error
    return message


def params_to_pb(params: SamplingParams) -> pb.SamplingParams:
    """Return the message for sampling parameters; raises RequestError for a value the wire cannot carry."""
    message = pb.SamplingParams(stop=params.stop_strings)
    for name in (*_OPTIONAL_FIELDS, *_FLOAT_FIELDS, "include_stop_str_in_output", "ignore_eos"):
        value = getattr(params, name)
        if name == "max_tokens" and value is None:
            value = UNLIMITED_TOKENS
        if value is not None:
            try:
                setattr(message, name, value)
            except ValueError as error:
                raise RequestError(name, value, "in the range of its protobuf field") from error
    try:
        message.stop_token_ids.extend(params.stop_token_ids)
        for token_id, bias in (params.logit_bias or {}).items():
            message.logit_bias[token_id] = bias
    except ValueError as error:
        raise RequestError("stop_token_ids or logit_bias", str(error), "token ids in [0, 2**32)") from error
    return message


def output_to_pb(output: RequestOutput) -> pb.GenerateResponse:
    """Return the message for a reply or a delta; usage and speculation travel with the last one only."""
    message = pb.GenerateResponse(
        request_id=output.request_id,
        outputs=[_completion_to_pb(completion) for completion in output.outputs],
        finished=output.finished,
    )
    if output.finished:
        message.usage.CopyFrom(
            pb.Usage(
                num_prompt_tokens=output.usage.num_prompt_tokens,
                num_cached_tokens=output.usage.num_cached_tokens,
                num_output_tokens=output.usage.num_output_tokens,
            )
        )
        message.speculation.CopyFrom(_speculation_to_pb(output.speculation))
    return message


def _completion_to_pb(completion: CompletionOutput) -> pb.CompletionOutput:
    message = pb.CompletionOutput(
        index=completion.index,
        text=completion.text,
        token_ids=completion.token_ids,
        logprobs=[_token_logprobs_to_pb(entry) for entry in completion.logprobs or ()],
    )
    if completion.finish_reason is not None:
        message.finish_reason = _FINISH_REASONS[completion.finish_reason]
    if isinstance(completion.stop_reason, str):
        message.stop_string = completion.stop_reason
    elif completion.stop_reason is not None:
        message.stop_token_id = completion.stop_reason
    return message


def _token_logprobs_to_pb(entry: TokenLogprobs) -> pb.TokenLogprobs:
    chosen, *top = [
        pb.Logprob(token_id=item.token_id, logprob=item.logprob, rank=item.rank) for item in (entry.chosen, *entry.top)
    ]
    return pb.TokenLogprobs(chosen=chosen, top=top)


def _speculation_to_pb(speculation: SpeculationStats) -> pb.Speculation:
    return pb.Speculation(
        verify_policy=speculation.verify_policy,
        num_rounds=speculation.num_rounds,
        num_drafted_tokens=speculation.num_drafted_tokens,
        num_verified_tokens=speculation.num_verified_tokens,
        num_accepted_tokens=speculation.num_accepted_tokens,
        acceptance_length=speculation.acceptance_length,
        drafter_versions=speculation.drafter_versions,
        verify_lens=speculation.verify_lens,
        expected_accepted_tokens=speculation.expected_accepted_tokens,
        draft_s=speculation.draft_s,
        verify_s=speculation.verify_s,
        host_s=speculation.host_s,
    )


def output_from_pb(message: pb.GenerateResponse, with_logprobs: bool) -> RequestOutput:
    """Return the reply in `message`.

    The wire carries no prompt, so `prompt_token_ids` is empty; before the last message of a stream, usage and
    speculation are zero.

    Args:
        message: A reply or a delta.
        with_logprobs: Whether log-probabilities were asked for; else `logprobs` is None.
    """
    return RequestOutput(
        request_id=message.request_id,
        prompt_token_ids=[],
        outputs=[_completion_from_pb(completion, with_logprobs) for completion in message.outputs],
        usage=Usage(message.usage.num_prompt_tokens, message.usage.num_cached_tokens, message.usage.num_output_tokens),
        speculation=_speculation_from_pb(message.speculation),
        finished=message.finished,
    )


def _completion_from_pb(message: pb.CompletionOutput, with_logprobs: bool) -> CompletionOutput:
    kind = message.WhichOneof("stop_reason")
    return CompletionOutput(
        index=message.index,
        text=message.text,
        token_ids=list(message.token_ids),
        logprobs=[_token_logprobs_from_pb(entry) for entry in message.logprobs] if with_logprobs else None,
        finish_reason=_FINISH_REASON_NAMES.get(message.finish_reason),
        stop_reason=None if kind is None else getattr(message, kind),
    )


def _token_logprobs_from_pb(message: pb.TokenLogprobs) -> TokenLogprobs:
    chosen, *top = [Logprob(item.token_id, item.logprob, item.rank) for item in (message.chosen, *message.top)]
    return TokenLogprobs(chosen, tuple(top))


def _speculation_from_pb(message: pb.Speculation) -> SpeculationStats:
    return SpeculationStats(
        verify_policy=message.verify_policy,
        num_rounds=message.num_rounds,
        num_drafted_tokens=message.num_drafted_tokens,
        num_verified_tokens=message.num_verified_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        num_emitted_tokens=round(message.acceptance_length * message.num_rounds),
        drafter_versions=tuple(message.drafter_versions),
        verify_lens=tuple(message.verify_lens),
        expected_accepted_tokens=message.expected_accepted_tokens,
        draft_s=message.draft_s,
        verify_s=message.verify_s,
        host_s=message.host_s,
    )


def server_info_to_pb(info: EngineInfo, stats: EngineStats, version: str) -> pb.ServerInfo:
    """Return the message for what is served and how busy the engine is."""
    message = pb.ServerInfo(
        version=version,
        draft=info.draft or "",
        draft_block_size=info.draft_block_size or 0,
        eos_token_ids=info.eos_token_ids,
        op_table=info.op_table,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_free_kv_blocks=stats.num_free_blocks,
    )
    if info.drafter_version is not None:
        message.drafter_version = info.drafter_version
    for name in (*_INFO_TEXT_FIELDS, *_INFO_INT_FIELDS):
        setattr(message, name, getattr(info, name))
    return message


def server_info_from_pb(message: pb.ServerInfo) -> ServerInfo:
    """Return what a server told about itself."""
    values: dict[str, object] = {name: getattr(message, name) for name in (*_INFO_TEXT_FIELDS, *_INFO_INT_FIELDS)}
    engine = EngineInfo(
        draft=message.draft or None,
        draft_block_size=message.draft_block_size or None,
        drafter_version=message.drafter_version if message.HasField("drafter_version") else None,
        eos_token_ids=tuple(message.eos_token_ids),
        op_table=dict(message.op_table),
        **values,  # type: ignore[arg-type]  # the messages' field types are the dataclass's
    )
    return ServerInfo(message.version, engine, message.num_running, message.num_waiting, message.num_free_kv_blocks)
