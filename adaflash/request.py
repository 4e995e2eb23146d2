# SPDX-License-Identifier: Apache-2.0
"""What goes into the engine and what comes out: sampling parameters, requests, replies and their counters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from adaflash.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16


def _check(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise RequestError(name, value, allowed)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_float(name: str, value: float, low: float, high: float, allowed: str) -> None:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    _check(numeric and math.isfinite(value) and low <= value <= high, name, value, allowed)


def _check_token_ids(name: str, token_ids: object, vocab_size: int) -> None:
    assert isinstance(token_ids, (list, tuple)), "token ids come as a sequence"
    for token_id in token_ids:
        _check(_is_int(token_id) and 0 <= token_id < vocab_size, name, token_id, f"token ids in [0, {vocab_size})")


@dataclass(frozen=True)
class SamplingParams:
    """How to turn logits into tokens and when to stop; names and defaults as in vLLM.

    Attributes:
        n: Independent samples per prompt, each with its own index and its own noise.
        temperature: 0 is greedy.
        top_p: Keep the smallest set of tokens whose probability reaches this.
        top_k: Keep this many tokens; 0 or -1 keeps all.
        min_p: Drop tokens below this share of the most likely token's probability.
        repetition_penalty: > 1 discourages tokens of the prompt and the output.
        presence_penalty: Subtracted once from every token present in the output.
        frequency_penalty: Subtracted per occurrence in the output.
        logit_bias: Added to the logits of these token ids.
        seed: Makes sampling reproducible; None takes one from the engine's seed and the request.
        max_tokens: Most tokens to generate; None generates up to the context limit.
        min_tokens: No stop before so many tokens.
        stop: Strings that end the output; excluded from the text unless `include_stop_str_in_output`.
        stop_token_ids: Token ids that end the output, besides the model's own.
        include_stop_str_in_output: Keep the stop string in the text.
        ignore_eos: Generate past the model's end-of-sequence tokens.
        logprobs: Log-probabilities of the chosen token and this many of the most likely; None for none.
        skip_special_tokens: Leave special tokens out of the text.
        allow_training: Let a server that learns online keep prompt and output to train its drafter.
        max_inter_token_ms: Steps that decode this request are not made longer than this by drafts or others' prompts,
            as measured costs predict it (policy `goodput`, else no effect). Where plain decoding leaves no room, each
            step still takes one KV block of prompt tokens. None prefers throughput.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    allow_training: bool = True
    max_inter_token_ms: float | None = None

    def __post_init__(self) -> None:
        _check(_is_int(self.n) and 1 <= self.n <= 128, "n", self.n, "in [1, 128]")
        _check_float("temperature", self.temperature, 0.0, 100.0, "a finite number in [0, 100]")
        _check_float("top_p", self.top_p, 1e-9, 1.0, "in (0, 1]")
        _check(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, ">= 1, or 0 or -1 for all tokens")
        _check_float("min_p", self.min_p, 0.0, 1.0, "in [0, 1]")
        _check_float("repetition_penalty", self.repetition_penalty, 1e-6, 1e6, "a finite number > 0")
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0, "in [-2, 2]")
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "in [-2, 2]")
        _check(self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63), "seed", self.seed, "in [0, 2**63)")
        valid_max = self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1)
        _check(valid_max, "max_tokens", self.max_tokens, "None or >= 1")
        valid_min = _is_int(self.min_tokens) and 0 <= self.min_tokens <= (self.max_tokens or math.inf)
        _check(valid_min, "min_tokens", self.min_tokens, f"in [0, max_tokens={self.max_tokens}]")
        valid_stop = self.stop is None or isinstance(self.stop, (str, list, tuple))
        _check(valid_stop, "stop", self.stop, "a string, a list of strings or None")
        valid_ids = isinstance(self.stop_token_ids, (list, tuple))
        _check(valid_ids, "stop_token_ids", self.stop_token_ids, "a list of token ids")
        _check(len(self.stop_strings) <= MAX_STOP_STRINGS, "stop", self.stop, f"at most {MAX_STOP_STRINGS} strings")
        _check(all(isinstance(s, str) and s for s in self.stop_strings), "stop", self.stop, "non-empty strings")
        valid_logprobs = self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS)
        _check(valid_logprobs, "logprobs", self.logprobs, f"None or in [0, {MAX_LOGPROBS}]")
        if self.max_inter_token_ms is not None:
            _check_float("max_inter_token_ms", self.max_inter_token_ms, 1e-3, 1e9, "None or a finite number > 0")
        for bias in (self.logit_bias or {}).values():
            _check_float("logit_bias", bias, -100.0, 100.0, "values in [-100, 100]")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, however they were given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens already present."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError when a token id in these parameters is outside [0, vocab_size)."""
        _check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        _check_token_ids("logit_bias", list(self.logit_bias or {}), vocab_size)


def check_prompt(prompt_token_ids: list[int], vocab_size: int, max_model_len: int) -> None:
    """Raise RequestError unless the prompt is non-empty, in vocabulary, and leaves room for one token."""
    _check(len(prompt_token_ids) > 0, "prompt_token_ids", prompt_token_ids, "at least one token")
    length = len(prompt_token_ids)
    _check(
        length < max_model_len, "prompt length", length, f"< max_model_len={max_model_len}, to leave room for output"
    )
    _check_token_ids("prompt_token_ids", prompt_token_ids, vocab_size)


@dataclass(frozen=True)
class Request:
    """One validated generation request, as the engine takes it.

    Attributes:
        request_id: Unique among the running requests.
        prompt_token_ids: The prompt, at least one token.
        params: How to sample; `seed` is set.
        prompt: The text the prompt came from, when it came as text.
        arrival_time: `time.monotonic()` at arrival, in seconds.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    arrival_time: float = 0.0


class Logprob(NamedTuple):
    """One token's log-probability under the target's raw logits (before penalties, bias and temperature)."""

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(NamedTuple):
    """The emitted token's log-probability, and the most likely alternatives in descending order."""

    chosen: Logprob
    top: tuple[Logprob, ...]


class Usage(NamedTuple):
    """Tokens of one request: what came in, what was found in the prefix cache, what went out (all samples)."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class SpeculationStats:
    """What speculation did for one request; the engine counts, the reply carries a copy.

    `num_rounds` counts decode rounds: target forwards, with or without drafts, that started from an anchor. The forward
    that ends a prefill also emits a token, but is no round, and its token is not in `num_emitted_tokens`.

    Attributes:
        verify_lens: Entry k counts the rounds that drafted and verified k drafts; the other rounds decoded plainly.
        expected_accepted_tokens: Drafts that policy `goodput` expected to be accepted, by its calibrated survival.
        draft_s: Seconds of drafting in the steps that decoded the request; other requests share them, as the next two.
        verify_s: Seconds of the target's forwards and of sampling.
        host_s: Seconds of everything else.
    """

    verify_policy: str = "off"
    num_rounds: int = 0
    num_drafted_tokens: int = 0
    num_verified_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    drafter_versions: tuple[int, ...] = ()
    verify_lens: tuple[int, ...] = ()
    expected_accepted_tokens: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0

    @property
    def num_plain_rounds(self) -> int:
        """Rounds without drafts."""
        return self.num_rounds - sum(self.verify_lens)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per decode round, the bonus token included (>= 1 once a round ran, else 0)."""
        return self.num_emitted_tokens / self.num_rounds if self.num_rounds else 0.0


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request, complete or so far; finish_reason `error`: the target's logits were not finite.

    `token_ids`, `logprobs` and usage count the same tokens: everything up to and including the token that
    completed a stop string or was a stop id. `text` ends before the stop string unless asked otherwise.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class RequestOutput(NamedTuple):
    """The reply to one request. In a stream, `outputs` hold only what is new since the last message."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    speculation: SpeculationStats
    finished: bool
    prompt: str | None = None


@dataclass(frozen=True)
class ChatMessage:
    """One turn of a conversation; `role` is what the model's chat template knows, e.g. system, user, assistant."""

    role: str
    content: str


Prompt = str | list[int] | list[ChatMessage]


@dataclass(frozen=True)
class EngineInfo:
    """What is being served and what is active; logged at start, served by GetServerInfo.

    Attributes:
        op_table: For each op, `native` or `reference`.
        eos_token_ids: Ids that end a generation unless `ignore_eos`.
    """

    model: str
    draft: str | None
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int
    verify_policy: str
    sampling_coupling: str
    draft_block_size: int | None
    drafter_version: int | None
    eos_token_ids: tuple[int, ...]
    op_table: dict[str, str]


@dataclass(frozen=True)
class EngineStats:
    """Gauges and counters of a running engine; counters only grow.

    Attributes:
        num_accepted_per_position: Entry k counts accepted drafts at draft position k.
        num_plain_steps: Steps in which nothing drafted.
        verify_lens: Entry k counts drafts of which k tokens were verified.
        expected_accepted_tokens: Drafts that policy `goodput` expected to be accepted.
        calibration_error: Expected calibration error of its survival, lately; 0 before any draft.
        step_time_s: Seconds spent in steps, by part: `draft`, `verify`, `host`.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_total_blocks: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_steps: int
    num_preemptions: int
    num_finished: int
    num_drafts: int
    num_drafted_tokens: int
    num_verified_tokens: int
    num_accepted_tokens: int
    num_accepted_per_position: tuple[int, ...]
    num_plain_steps: int
    verify_lens: tuple[int, ...]
    expected_accepted_tokens: float
    calibration_error: float
    step_time_s: dict[str, float]
