# SPDX-License-Identifier: Apache-2.0
"""An EngineClient without a model: counts tokens out at a set pace, so that tests can watch the server around it."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncGenerator

from adaflash.errors import CapacityError, RequestError, UnavailableError
from adaflash.request import (
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
    check_prompt,
)

VOCAB_SIZE = 1000
MAX_MODEL_LEN = 4096


class FakeRequest:
    """One running request: deltas nobody took yet are merged, as the contract asks."""

    def __init__(self, request_id: str, num_prompt_tokens: int, params: SamplingParams, token_text: str) -> None:
        self.request_id = request_id
        self.params = params
        self.num_produced = 0
        self.finish_reason: FinishReason | None = None
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self._token_text = token_text
        self._num_prompt_tokens = num_prompt_tokens
        self._num_taken = 0

    def produce(self) -> None:
        """Generate one token of every sample."""
        self.num_produced += 1
        if self.num_produced >= self.params.max_tokens:
            self.finish_reason = "length"
            self.ended.set()
        self.ready.set()

    def stop(self) -> None:
        """End with finish_reason `abort`."""
        self.finish_reason = "abort"
        self.ended.set()
        self.ready.set()

    async def take(self) -> RequestOutput:
        """Wait for and return everything produced since the last call."""
        await self.ready.wait()
        self.ready.clear()
        new = list(range(self._num_taken, self.num_produced))
        self._num_taken = self.num_produced
        outputs = [self._completion(index, new) for index in range(self.params.n)]
        usage = Usage(self._num_prompt_tokens, 0, self.num_produced * self.params.n)
        stats = SpeculationStats("fixed", self.num_produced, 4, 3, 2, self.num_produced, (1,))
        return RequestOutput(self.request_id, [], outputs, usage, stats, finished=self.finish_reason is not None)

    def _completion(self, index: int, new: list[int]) -> CompletionOutput:
        logprobs = None
        if self.params.logprobs is not None:
            top = tuple(Logprob(rank, -float(rank), rank) for rank in range(1, self.params.logprobs + 1))
            logprobs = [TokenLogprobs(Logprob(token, -0.5, 1), top) for token in new]
        text = "".join(f"{self._token_text}{token}" for token in new)
        return CompletionOutput(index, text, [t % VOCAB_SIZE for t in new], logprobs, self.finish_reason)


class FakeEngine:
    """Generates token ids 0, 1, 2, ... with the text ` 0 1 2`.

    Args:
        token_delay_s: Time between tokens of a request.
        max_num_requests: More are refused with CapacityError.
        token_text: What every token's text starts with.
        max_output_tokens: End of a request whatever it asks.
        failure: Raised instead of generating.
        tokens_before_gate: A request with so many tokens waits until `gate` is set; None opens it from the start.
    """

    def __init__(
        self,
        token_delay_s: float = 0.0,
        max_num_requests: int = 1000,
        token_text: str = " ",
        max_output_tokens: int = MAX_MODEL_LEN,
        failure: Exception | None = None,
        tokens_before_gate: int | None = None,
    ) -> None:
        self.running: dict[str, FakeRequest] = {}
        self.params_seen: list[SamplingParams] = []
        self.prompts_seen: list[Prompt] = []
        self.num_finished = 0
        self.num_aborted = 0
        self.closed = False
        self.failure = failure
        self._token_delay_s = token_delay_s
        self._max_num_requests = max_num_requests
        self._token_text = token_text
        self._max_output_tokens = max_output_tokens
        self._draining = False
        self._tokens_before_gate = tokens_before_gate or 0
        self.gate = asyncio.Event()
        if tokens_before_gate is None:
            self.gate.set()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model="fake",
            draft=None,
            device="cpu",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            block_size=16,
            num_kv_blocks=256,
            verify_policy="fixed",
            sampling_coupling="gumbel",
            draft_block_size=8,
            drafter_version=3,
            eos_token_ids=(2,),
            op_table={"rms_norm": "native", "sample": "reference"},
        )

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_waiting=0,
            num_free_blocks=256 - len(self.running),
            num_total_blocks=256,
            num_prompt_tokens=10,
            num_cached_tokens=4,
            num_output_tokens=20,
            num_steps=5,
            num_preemptions=1,
            num_finished=self.num_finished,
            num_drafts=10,
            num_drafted_tokens=70,
            num_verified_tokens=40,
            num_accepted_tokens=25,
            num_accepted_per_position=(10, 8, 5, 2),
            num_plain_steps=3,
            verify_lens=(1, 2, 0, 3, 0, 0, 0, 4),
            expected_accepted_tokens=24.5,
            calibration_error=0.02,
            step_time_s={"draft": 0.5, "verify": 1.5, "host": 0.1},
        )

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        if self.failure is not None:
            raise self.failure
        request = self._admit(prompt, params, request_id or uuid.uuid4().hex)
        producer = asyncio.create_task(self._produce(request))
        finished = False
        try:
            while not finished:
                output = await request.take()
                finished = output.finished
                yield output
        finally:
            producer.cancel()
            del self.running[request.request_id]
            if request.finish_reason == "length":
                self.num_finished += 1
            else:
                self.num_aborted += 1

    async def abort(self, request_id: str) -> bool:
        request = self.running.get(request_id)
        if request is None or request.finish_reason is not None:
            return False
        request.stop()
        return True

    async def drain(self, timeout_s: float) -> bool:
        self._draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        unfinished = list(self.running.values())
        for request in unfinished:
            request.stop()
        return not unfinished

    async def close(self) -> None:
        self.closed = True

    def _admit(self, prompt: Prompt, params: SamplingParams, request_id: str) -> FakeRequest:
        if self._draining:
            raise UnavailableError("the server is shutting down")
        if len(self.running) >= self._max_num_requests:
            raise CapacityError(f"{len(self.running)} requests are running, the limit is reached", retry_after_s=0.25)
        if request_id in self.running:
            raise RequestError("request_id", request_id, "unique among running requests")
        token_ids = [ord(c) % VOCAB_SIZE for c in prompt] if isinstance(prompt, str) else prompt
        if token_ids and not isinstance(token_ids[0], int):
            token_ids = [len(turn.content) % VOCAB_SIZE for turn in token_ids]
        check_prompt(token_ids, VOCAB_SIZE, MAX_MODEL_LEN)
        params.check_vocabulary(VOCAB_SIZE)
        self.params_seen.append(params)
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens, self._max_output_tokens), min_tokens=0)
        self.prompts_seen.append(prompt)
        request = self.running[request_id] = FakeRequest(request_id, len(token_ids), params, self._token_text)
        return request

    async def _produce(self, request: FakeRequest) -> None:
        while request.finish_reason is None:
            if request.num_produced >= self._tokens_before_gate:
                await self.gate.wait()
            await asyncio.sleep(self._token_delay_s)
            if request.finish_reason is None:
                request.produce()
