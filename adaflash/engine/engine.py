# SPDX-License-Identifier: Apache-2.0
"""The engine: requests in, committed tokens out, one `step()` at a time. Synchronous and single-threaded."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch

from adaflash.cache.block_manager import BlockManager
from adaflash.config import EngineConfig
from adaflash.engine.capture import CaptureConfig, start_capture
from adaflash.engine.detokenizer import Detokenizer
from adaflash.engine.loading import LoadedEngine, load_engine
from adaflash.engine.merge import OutputMerger
from adaflash.engine.output import SampleOutput, snapshot
from adaflash.engine.preparation import RequestPreparer, as_params_list, as_prompt_list
from adaflash.engine.request_state import RequestState, Sample
from adaflash.engine.rollout import DrafterRollout
from adaflash.engine.runner import Drafts, Round, StepTimes, Verified
from adaflash.engine.scheduler import Schedule, Scheduler
from adaflash.engine.sequence import Sequence
from adaflash.engine.speculation import Speculation
from adaflash.engine.statistics import DraftCount, EngineCounters, count_round
from adaflash.errors import RequestError
from adaflash.request import (
    EngineInfo,
    EngineStats,
    FinishReason,
    Prompt,
    Request,
    RequestOutput,
    SamplingParams,
    SpeculationStats,
    Usage,
)
from adaflash.training.trajectories import RoundCounts

logger = logging.getLogger(__name__)


class Engine:
    """Serves a target model, speculatively when there is a drafter. Not thread-safe; `AsyncEngine` is.

    Args:
        config: What to load and how to run it.
        progress: Called with (description, bytes done, bytes in all) while loading.
        loaded: Models and pools to use instead of loading `config.model`; for tests and tools.
        capture: What becomes a trajectory for a trainer; needs a drafter. None captures nothing.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str, int, int], None] | None = None,
        loaded: LoadedEngine | None = None,
        capture: CaptureConfig | None = None,
    ) -> None:
        self.config = config
        self._loaded = loaded or load_engine(config, progress)
        self._runner = self._loaded.runner
        self._eos_token_ids = self._loaded.info.eos_token_ids
        self._blocks = BlockManager(self._loaded.num_kv_blocks, self._loaded.block_size, config.enable_prefix_caching)
        self._scheduler = Scheduler(self._blocks, config.max_num_seqs, config.max_num_batched_tokens, limits=None)
        self._speculation = Speculation(config, self._runner, self._scheduler, self._loaded.max_model_len)
        self._counters = EngineCounters(self._speculation.draft_width)
        self._requests: dict[str, RequestState] = {}
        self._samples: dict[int, Sample] = {}
        drafters = self._runner.drafters
        self._rollout = None if drafters is None else DrafterRollout(drafters, self._requests)
        if self._rollout is not None:
            self._speculation.is_on_trial = self._rollout.is_on_trial
        self._recorder = None if capture is None else start_capture(capture, self._runner, self._blocks)
        self._last_host_s = 0.0
        self._keys = itertools.count()
        self._preparer = RequestPreparer(
            self._loaded.tokenizer, self._loaded.info.vocab_size, self._loaded.max_model_len, config.seed
        )

    # ---- requests --------------------------------------------------------------------------------------------

    def prepare(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> Request:
        """Tokenize and validate a request without touching the engine's state; safe to call from any thread.

        Raises:
            RequestError: Names the field, its value and what is allowed.
        """
        return self._preparer.prepare(prompt, params, request_id)

    def submit(self, request: Request) -> None:
        """Queue a prepared request.

        Raises:
            RequestError: A request of the same id is running.
        """
        if request.request_id in self._requests:
            raise RequestError("request_id", request.request_id, "unique among running requests")
        samples = [self._new_sample(request, index) for index in range(request.params.n)]
        is_captured = self._recorder is not None and self._recorder.wants(request)
        for sample in samples:
            sample.seq.is_captured = is_captured
        if self._rollout is not None:
            self._rollout.assign(sample.seq for sample in samples)
        stats = SpeculationStats(verify_policy=self.verify_policy)
        unforked = [sample.seq for sample in samples[1:]]
        self._requests[request.request_id] = RequestState(request, samples, stats, unforked, len(samples))
        self._scheduler.add(samples[0].seq)

    def add_request(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> str:
        """Validate and queue a request; returns its id. See `prepare` and `submit`."""
        request = self.prepare(prompt, params, request_id)
        self.submit(request)
        return request.request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request and free its memory; returns its last delta (finish_reason `abort`), None if it is unknown."""
        state = self._requests.get(request_id)
        return None if state is None else self._end(state, "abort")

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def generate(
        self, prompts: Prompt | SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Generate for one or many prompts and return the replies in order.

        Args:
            prompts: A string, a token-id list, a list of `ChatMessage`, or a list of any of these.
            params: One for all prompts, or one each; None takes the defaults.
        """
        prompt_list = as_prompt_list(prompts)
        each = as_params_list(params, len(prompt_list))
        requests = [self.prepare(prompt, p) for prompt, p in zip(prompt_list, each, strict=True)]
        replies = {request.request_id: OutputMerger() for request in requests}
        num_running = len(replies)
        try:
            for request in requests:
                self.submit(request)
            while num_running:
                for delta in self.step():
                    if delta.request_id in replies:
                        replies[delta.request_id].add(delta)
                        num_running -= delta.finished
        except BaseException:
            for request in requests:
                self.abort(request.request_id)
            raise
        return [reply.result() for reply in replies.values()]

    def _new_sample(self, request: Request, index: int) -> Sample:
        key, params = next(self._keys), request.params
        room = self._loaded.max_model_len - len(request.prompt_token_ids)
        seq = Sequence(key, request, index, min(params.max_tokens or room, room))
        tokenizer = self._loaded.tokenizer
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer, params, request.prompt_token_ids)
        output = SampleOutput(index, params, frozenset(self._eos_token_ids), seq.max_output_tokens, detokenizer)
        sample = Sample(seq, output)
        self._samples[key] = sample
        return sample

    # ---- the step --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one step: schedule, draft, choose lengths, verify, commit. Returns what is new, per request."""
        started = time.perf_counter()
        if self._recorder is not None:
            self._recorder.give_back()
        self._scheduler.takes_bare_prefixes = self._speculation.takes_bare_prefixes
        plan = self._scheduler.schedule()
        for seq in plan.preempted:
            self._runner.drop_pending(seq)
        if not plan.scheduled:
            return []
        self._speculation.begin_step(plan)
        before = replace(self._runner.times)
        self._register_new(plan)
        self._runner.copy_blocks(plan.copy_pairs)
        caught_up = self._catch_up(plan)
        rounds, drafts = self._draft(plan)
        verified = self._runner.verify(rounds, drafts)
        times = StepTimes(self._runner.times.draft - before.draft, self._runner.times.verify - before.verify)
        deltas = self._commit(rounds, verified, times)
        if self._rollout is not None:
            self._rollout.settle()
        elapsed_s = time.perf_counter() - started
        self._last_host_s = elapsed_s - times.draft - times.verify
        num_draft_rows = sum(r.num_drafted + 1 for r in rounds if r.draft_row is not None)
        num_verified = sum(len(r.draft_token_ids) for r in rounds)
        if num_decoding := sum(r.scheduled.samples for r in rounds):
            self._scheduler.forecast.observe(num_decoding + num_verified, num_decoding)
        self._speculation.end_step(num_draft_rows, num_verified, times.draft, elapsed_s - times.draft, caught_up)
        self._counters.end_step(elapsed_s, self._runner.times, is_plain=num_draft_rows == 0)
        return deltas

    def _register_new(self, plan: Schedule) -> None:
        """Give sequences that run for the first time their sampling state; waiting ones hold no device memory."""
        for item in plan.scheduled:
            seq = item.seq
            if seq.key not in self._runner.sampling:
                params = seq.request.params
                assert params.seed is not None, "prepare() resolved the seed"
                self._runner.sampling.add(
                    seq.key, seq.request.prompt_token_ids, params, params.seed, seq.sample_index, self._eos_token_ids
                )

    def _catch_up(self, plan: Schedule) -> bool:
        """Write the drafter context that was put off where it is needed now; returns whether there was some."""
        backlog = self._runner.backlog
        if backlog is None:
            return False
        behind = [item.seq for item in plan.scheduled if item.max_drafts > 0 and item.seq.num_pending]
        if backlog.num_free < len(plan.scheduled):
            behind = [seq for seq in self._scheduler.running if seq.num_pending]
        if behind:
            self._runner.write_pending(behind)
            for seq in behind:
                self._scheduler.catch_up(seq)
        return bool(behind)

    def _draft(self, plan: Schedule) -> tuple[list[Round], Drafts | None]:
        drafting = [item for item in plan.scheduled if item.max_drafts > 0]
        contexts = map(self._speculation.context, plan.scheduled)
        if not drafting:
            return [Round(item, [], None, when) for item, when in zip(plan.scheduled, contexts, strict=True)], None
        num_drafts = self._speculation.num_drafts(drafting)
        drafts = self._runner.draft(drafting, num_drafts)
        lens = self._speculation.choose(drafts.signals, drafting)
        rounds, row = [], 0
        for item, when in zip(plan.scheduled, contexts, strict=True):
            if item.max_drafts > 0:
                rounds.append(Round(item, drafts.token_ids[row][: lens[row]], row, when, num_drafts))
                row += 1
            else:
                rounds.append(Round(item, [], None, when))
        return rounds, drafts

    def _commit(self, rounds: list[Round], verified: list[Verified], times: StepTimes) -> list[RequestOutput]:
        decided = iter(verified)
        touched: dict[str, list[Sample]] = {}
        corrupted: set[str] = set()
        num_accepted: list[int] = []
        for r in rounds:
            seq, num_tokens, samples, _ = r.scheduled
            if not samples:
                self._scheduler.commit(seq, num_tokens, r.context)
                continue
            result, sample = next(decided), self._samples[seq.key]
            touched.setdefault(seq.request.request_id, []).append(sample)
            if r.draft_row is not None:
                num_accepted.append(0 if result.corrupted else len(result.token_ids) - 1)
            if result.corrupted:
                corrupted.add(seq.request.request_id)
            else:
                self._commit_sample(sample, r, result)
        self._speculation.observe(num_accepted)
        for key in touched:
            stats = self._requests[key].stats
            stats.draft_s += times.draft
            stats.verify_s += times.verify
            stats.host_s += self._last_host_s  # of the step before: this one has not ended
        return [
            self._fail(self._requests[key], samples) if key in corrupted else self._delta(self._requests[key], samples)
            for key, samples in touched.items()
        ]

    def _commit_sample(self, sample: Sample, r: Round, result: Verified) -> None:
        seq, output = sample.seq, sample.output
        state = self._requests[seq.request.request_id]
        was_decoding = seq.is_decoding
        if not was_decoding and not seq.num_output_tokens and seq is state.samples[0].seq:
            self._counters.count_prompt(seq.num_prompt_tokens, seq.num_cached_tokens)
        emitted = output.extend(result.token_ids, result.logprobs)
        num_emitted = len(emitted)
        seq.append(emitted)
        if seq.request.params.has_penalties:
            self._runner.sampling.commit(seq.key, emitted)
        state.num_output_tokens += num_emitted
        self._counters.num_output_tokens += num_emitted
        if was_decoding:
            self._count_round(state.stats, sample, r, min(len(result.token_ids) - 1, num_emitted), num_emitted)
        self._scheduler.commit(seq, num_emitted if was_decoding else r.scheduled.num_tokens, r.context)
        if state.unforked and seq is state.samples[0].seq:
            self._scheduler.fork(seq, state.unforked)
            state.unforked = []
        if output.finished:
            state.num_unfinished -= 1
            self._retire(sample)

    def _count_round(
        self, stats: SpeculationStats, sample: Sample, r: Round, num_accepted: int, num_emitted: int
    ) -> None:
        seq, num_verified, draft = sample.seq, len(r.draft_token_ids), None
        if seq.is_captured:
            sample.rounds.append(RoundCounts(num_verified, num_accepted))
        if r.draft_row is not None:
            self.rollout.observe(seq, num_emitted)
            expected = self._speculation.expected_tokens(r.draft_row)
            draft = DraftCount(seq.drafter_version, r.num_drafted, num_verified, num_accepted, expected)
            self._counters.count_draft(draft)
        count_round(stats, num_emitted, draft, self._speculation.draft_width)

    def _delta(self, state: RequestState, samples: list[Sample]) -> RequestOutput:
        if state.num_unfinished == 0:
            self._forget(state)
        return self._output(state, samples, state.num_unfinished == 0)

    def _fail(self, state: RequestState, touched: list[Sample]) -> RequestOutput:
        """End a request whose target logits were not finite; samples that advanced in this step keep their tokens."""
        logger.error("target logits are not finite request_id=%s", state.request.request_id)
        return self._end(state, "error", touched)

    def _end(self, state: RequestState, reason: FinishReason, touched: SequenceOf[Sample] = ()) -> RequestOutput:
        """End every running sample of a request for `reason`; returns the last delta, with that of `touched` ones."""
        self._forget(state)
        ended = [sample for sample in state.samples if not sample.output.finished]
        for sample in ended:
            sample.output.finish(reason)
            self._retire(sample)
        return self._output(state, [*ended, *(s for s in touched if s not in ended)], finished=True)

    def _forget(self, state: RequestState) -> None:
        del self._requests[state.request.request_id]
        if self._rollout is not None:
            self._rollout.drafters.release(state.samples[0].seq.drafter_version)
        self._counters.num_finished += 1

    def _output(self, state: RequestState, samples: list[Sample], finished: bool) -> RequestOutput:
        request = state.request
        num_cached = state.samples[0].seq.num_cached_tokens
        return RequestOutput(
            request.request_id,
            request.prompt_token_ids,
            [sample.output.take_delta() for sample in samples],
            Usage(len(request.prompt_token_ids), num_cached, state.num_output_tokens),
            snapshot(state.stats),
            finished,
            request.prompt,
        )

    def _retire(self, sample: Sample) -> None:
        self._runner.drop_pending(sample.seq)
        self._scheduler.give_up_pending(sample.seq)
        self._speculation.forget(sample.seq)
        if self._recorder is not None and self._recorder.record(sample):
            sample.seq.block_table = []  # the recorder's now
        self._scheduler.remove(sample.seq)
        if sample.seq.key in self._runner.sampling:
            self._runner.sampling.remove(sample.seq.key)
        del self._samples[sample.seq.key]

    # ---- online learning --------------------------------------------------------------------------------------

    @property
    def rollout(self) -> DrafterRollout:
        """The drafter versions; only of an engine with a drafter."""
        assert self._rollout is not None, "the engine has no drafter"
        return self._rollout

    def rest(self) -> None:
        """Release what the last requests left, when nothing runs."""
        if self._recorder is not None:
            self._recorder.flush()

    def close(self) -> None:
        """Hand over what was captured, and keep what was learned about costs."""
        if self._recorder is not None:
            self._recorder.close()
        self._speculation.close()

    # ---- policy ----------------------------------------------------------------------------------------------

    @property
    def verify_policy(self) -> str:
        """Name of the active policy."""
        return self._speculation.policy

    def set_verify_policy(self, name: str) -> None:
        """Switch the policy between two steps; tokens do not change, only how fast they come.

        Raises:
            ConfigError: The policy needs a drafter or a length head that is not there.
        """
        self._speculation.switch(name)
        for state in self._requests.values():
            state.stats.verify_policy = self.verify_policy
        logger.info("verify policy set policy=%s", self.verify_policy)

    # ---- reporting -------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What is being served and what is active."""
        drafter = self._runner.drafter
        return replace(
            self._loaded.info,
            verify_policy=self.verify_policy,
            drafter_version=None if drafter is None else drafter.version,
        )

    def stats(self) -> EngineStats:
        """Return current gauges and counters."""
        return self._counters.snapshot(self._scheduler, self._blocks, self._speculation.calibration_error)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._blocks.reset_prefix_cache()
