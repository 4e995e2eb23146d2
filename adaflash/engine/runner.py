# SPDX-License-Identifier: Apache-2.0
"""The only part of the engine that touches the device: draft forward, target forward, acceptance, KV copies."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adaflash.cache.block_manager import MIXED_CONTEXT
from adaflash.cache.kv_cache import KVCache
from adaflash.engine.context_backlog import ContextBacklog
from adaflash.engine.features import FeaturePool
from adaflash.engine.graphs import ForwardGraphs, GraphSetting, TargetRows
from adaflash.engine.logprobs import step_logprobs
from adaflash.engine.sampling import SamplingBuilder
from adaflash.engine.scheduler import ScheduledSequence
from adaflash.engine.sequence import ContextWrite, Sequence
from adaflash.models.base import TargetModel
from adaflash.ops.backend import Backend
from adaflash.ops.fetch import fetch
from adaflash.ops.metadata import PackedBatch, VerifyMetadata, device_tensor
from adaflash.ops.reference_sampling import largest_logits
from adaflash.request import TokenLogprobs
from adaflash.speculative.base import BlockStates, Drafter
from adaflash.speculative.budget import DraftSignals
from adaflash.speculative.packing import PackEntry, pack
from adaflash.speculative.resident import ResidentDrafters


class Drafts(NamedTuple):
    """Drafts of one step: tokens [S][k] and what policies may see on the host, logits [S, k, Vd] if they are needed."""

    token_ids: list[list[int]]
    signals: DraftSignals
    logits: Tensor | None


class Round(NamedTuple):
    """One sequence's part in a target forward.

    Attributes:
        scheduled: Its share of the step.
        draft_token_ids: Drafts to verify, possibly none.
        draft_row: Its row in the step's `Drafts`; None when it did not draft.
        context: When the drafter's context of its rows is written.
        num_drafted: Drafts made, of which the first are verified.
    """

    scheduled: ScheduledSequence
    draft_token_ids: list[int]
    draft_row: int | None
    context: ContextWrite
    num_drafted: int = 0


class Verified(NamedTuple):
    """What a target forward decided for one sequence.

    `token_ids`: accepted drafts, then the bonus token. `logprobs`: one per token, or None when not asked for.
    `corrupted`: the target's logits of these rows were not finite; the tokens mean nothing.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    corrupted: bool


@dataclass
class StepTimes:
    """Seconds spent on the device's work; the rest of a step is host time."""

    draft: float = 0.0
    verify: float = 0.0


class Runner:
    """Runs the models for the engine.

    Args:
        backend: Where the ops run.
        target: The target model, packed.
        target_kv: Its KV pool.
        drafters: The resident drafter versions, or None.
        draft_kv: The drafter's KV pool; same block numbers as the target's.
        sampling: Builds sampling rows; knows penalties and counts.
        keep_draft_logits: Whether acceptance needs q (coupling `rejection`).

    Attributes:
        features: Where the target's features of captured sequences are kept; None keeps none.
        backlog: Features of tokens whose drafter context is still to be written; None where none is put off.
        graphs: Captured forwards; None where the device captures none.
    """

    def __init__(
        self,
        backend: Backend,
        target: TargetModel,
        target_kv: KVCache,
        drafters: ResidentDrafters | None,
        draft_kv: KVCache | None,
        sampling: SamplingBuilder,
        keep_draft_logits: bool,
    ) -> None:
        assert (drafters is None) == (draft_kv is None), "a drafter comes with its KV pool"
        self.backend = backend
        self.target = target
        self.drafters = drafters
        self.sampling = sampling
        self.times = StepTimes()
        self.features: FeaturePool | None = None
        self.backlog: ContextBacklog | None = None
        self.graphs: ForwardGraphs | None = None
        self._target_kv = target_kv
        self._draft_kv = draft_kv
        self._keep_draft_logits = keep_draft_logits

    @property
    def drafter(self) -> Drafter | None:
        """The last good drafter; its shapes are those of every version."""
        return None if self.drafters is None else self.drafters.current

    def make_graphs(self, setting: GraphSetting) -> None:
        """Run decoding and drafting through captured graphs from now on."""
        self.graphs = ForwardGraphs(setting, self.run_target, self._run_drafter)

    def _run_drafter(self, drafter: Drafter, batch: PackedBatch) -> BlockStates:
        assert self._draft_kv is not None, "a drafter comes with its KV pool"
        return drafter.block_states(batch, self._draft_kv)

    def make_backlog(self, max_num_seqs: int) -> None:
        """Make room for features whose drafter context is written later, unless there is."""
        assert self.drafter is not None, "only a drafter has context"
        if self.backlog is None:
            taps_size = len(self.drafter.tap_layer_ids) * self.target.config.hidden_size
            self.backlog = ContextBacklog(taps_size, self.target.dtype, self.backend.device, max_num_seqs)

    def drop_pending(self, seq: Sequence) -> None:
        """Forget the features of a sequence whose context will not be written, or from other rows."""
        if self.backlog is not None:
            self.backlog.drop(seq.key)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy KV blocks of both models, `(source, destination)`."""
        if not pairs:
            return
        self._target_kv.copy_blocks(self.backend, pairs)
        if self._draft_kv is not None:
            self._draft_kv.copy_blocks(self.backend, pairs)
        if self.features is not None:
            self.features.copy_blocks(pairs, self._target_kv.block_size)

    def draft(self, drafting: list[ScheduledSequence], num_drafts: int) -> Drafts:
        """Draft `num_drafts` tokens for every sequence of `drafting`, in one forward of each version in use."""
        started = time.perf_counter()
        versions = [item.seq.drafter_version for item in drafting]
        if len(set(versions)) == 1:
            drafts = self._draft_with(versions[0], drafting, num_drafts)
        else:
            order = sorted(range(len(drafting)), key=versions.__getitem__)
            groups = itertools.groupby(order, key=versions.__getitem__)
            parts = [self._draft_with(version, [drafting[i] for i in group], num_drafts) for version, group in groups]
            drafts = _merge(parts, order)
        self.times.draft += time.perf_counter() - started
        return drafts

    def _draft_with(self, version: int, drafting: list[ScheduledSequence], num_drafts: int) -> Drafts:
        assert self.drafters is not None, "drafting needs a drafter"
        drafter = self.drafters[version]
        masks = [drafter.mask_token_id] * num_drafts
        seqs = [item.seq for item in drafting]
        entries = [
            PackEntry([seq.token_ids[-1], *masks], seq.num_computed, seq.block_table, len(masks) + 1) for seq in seqs
        ]
        rows = self.sampling.draft_rows(
            [seq.key for seq in seqs],
            [seq.num_output_tokens for seq in seqs],
            len(masks),
            drafter.column_token_ids,
            None,  # The drafter itself never proposes its mask id.
        )
        block = drafter.choose(self._block_states(drafter, entries), rows, self._keep_draft_logits)
        ratio = () if block.length_ratio is None else (block.length_ratio,)
        token_ids, *signals = (values.tolist() for values in fetch(block.token_ids, block.confidence, *ratio))
        return Drafts(token_ids, DraftSignals(signals[0], signals[1] if ratio else None), block.logits)

    def _block_states(self, drafter: Drafter, entries: list[PackEntry]) -> BlockStates:
        assert self._draft_kv is not None, "drafting needs the drafter's KV pool"
        if self.graphs is not None:
            return self.graphs.run_drafter(drafter, entries).output.first(len(entries))
        return self._run_drafter(drafter, pack(entries, self._draft_kv.block_size, self.backend.device))

    def write_pending(self, seqs: list[Sequence]) -> None:
        """Write the drafter context that was put off, of sequences that have some; the time counts as drafting."""
        assert self.drafters is not None, "there is a drafter to write for"
        assert self.backlog is not None, "there is room for what is put off"
        assert self._draft_kv is not None, "a drafter comes with its KV pool"
        started = time.perf_counter()
        seqs = sorted(seqs, key=lambda seq: seq.context_id)
        for _, group in itertools.groupby(seqs, key=lambda seq: seq.context_id):
            behind = list(group)
            taps = self.backlog.take([seq.key for seq in behind])
            positions, slots = _pending_rows(behind, self._draft_kv.block_size, self.backend.device)
            self.drafters[behind[0].drafter_version].write_context(taps, positions, slots, self._draft_kv)
        self.times.draft += time.perf_counter() - started

    def verify(self, rounds: list[Round], drafts: Drafts | None) -> list[Verified]:
        """Run the target over all rounds, and decide the tokens of those that sample, in order.

        Args:
            rounds: Every scheduled sequence's part. One whose context is written later has a single row.
            drafts: The step's drafts, when any sequence drafted.
        """
        started = time.perf_counter()
        logits = self._forward(rounds)
        sampled = [r for r in rounds if r.scheduled.samples]
        verified = self._decide(sampled, logits, drafts) if sampled else []
        self.times.verify += time.perf_counter() - started
        return verified

    def _forward(self, rounds: list[Round]) -> Tensor:
        """Return logits [R, V] of the rows that need them; writes the target's KV, the drafters', and the features."""
        contexts = [r.context for r in rounds]
        needs_context = contexts.count(ContextWrite.NEVER) < len(contexts)
        needs_taps = self.drafter is not None and (needs_context or self.features is not None)
        batch, rows = self._target_rows([_entry(r) for r in rounds], needs_taps)
        if rows.taps is not None:
            if needs_context:
                self._write_context(rows.taps, batch, rounds, contexts)
            if self.features is not None:
                self.features.write(batch, rows.taps, rows.hidden, [r.scheduled.seq.is_captured for r in rounds])
        return rows.logits

    def _target_rows(self, entries: list[PackEntry], needs_taps: bool) -> tuple[PackedBatch, TargetRows]:
        if self.graphs is not None and all(entry.num_logits == len(entry.token_ids) for entry in entries):
            ran = self.graphs.run_target(entries, needs_taps)
            hidden, taps, logits = ran.output
            num_tokens = ran.batch.num_tokens
            taps = None if taps is None else taps[:num_tokens]
            return ran.batch, TargetRows(hidden[:num_tokens], taps, logits[:num_tokens])
        batch = pack(entries, self._target_kv.block_size, self.backend.device)
        return batch, self.run_target(batch, needs_taps)

    def run_target(self, batch: PackedBatch, needs_taps: bool) -> TargetRows:
        """Run the target, without deciding anything on the host."""
        meta = self.backend.attention_metadata(batch)
        taps = self.drafter.tap_layer_ids if self.drafter is not None and needs_taps else ()
        out = self.target.forward(batch.token_ids, batch.positions, batch.slot_mapping, meta, self._target_kv, taps)
        return TargetRows(out.hidden, out.taps, self.target.compute_logits(out.hidden[batch.logits_indices]))

    def _write_context(
        self, taps: Tensor, batch: PackedBatch, rounds: list[Round], contexts: list[ContextWrite]
    ) -> None:
        """Write every sequence's drafter KV with its own version's weights, or keep the features for later.

        Rejected rows are written too: they lie in the sequence's own lookahead slots and are overwritten.
        """
        assert self.drafters is not None, "there is a drafter to write for"
        assert self._draft_kv is not None, "a drafter comes with its KV pool"
        seqs = [r.scheduled.seq for r in rounds]
        writers = {seq.context_id: seq.drafter_version for seq in seqs}
        if len(writers) == 1 and contexts.count(ContextWrite.NOW) == len(contexts):
            self.drafters[seqs[0].drafter_version].write_context(
                taps, batch.positions, batch.slot_mapping, self._draft_kv
            )
            return
        is_now = np.array([context is ContextWrite.NOW for context in contexts])
        now = np.repeat(np.where(is_now, [seq.context_id for seq in seqs], MIXED_CONTEXT), batch.query_lens_cpu)
        for context_id, version in writers.items():
            rows = np.flatnonzero(now == context_id)
            if len(rows):
                index = device_tensor(rows, self.backend.device)
                positions, slots = batch.positions[index], batch.slot_mapping[index]
                self.drafters[version].write_context(taps[index], positions, slots, self._draft_kv)
        later = [i for i, context in enumerate(contexts) if context is ContextWrite.LATER]
        if later:
            assert self.backlog is not None, "there is room for what is put off"
            starts = np.cumsum(batch.query_lens_cpu) - batch.query_lens_cpu
            index = device_tensor(starts[later], self.backend.device)
            self.backlog.add([seqs[i].key for i in later], taps if len(later) == len(taps) else taps[index])

    def _decide(self, sampled: list[Round], logits: Tensor, drafts: Drafts | None) -> list[Verified]:
        seqs = [r.scheduled.seq for r in sampled]
        num_drafts = [len(r.draft_token_ids) for r in sampled]
        rows = self.sampling.verify_rows(
            [seq.key for seq in seqs],
            [seq.num_output_tokens for seq in seqs],
            num_drafts,
            [r.draft_token_ids for r in sampled],
        )
        out = self.backend.verify_drafts(
            logits,
            _padded_drafts(sampled, logits.device),
            self._draft_logits(sampled, drafts),
            _verify_metadata(num_drafts, logits.device),
            rows,
            None if self.drafter is None else self.drafter.column_token_ids,
        )
        decided, num_accepted, largest = fetch(out.token_ids, out.num_accepted, largest_logits(logits))
        token_ids = [row[: accepted + 1] for row, accepted in zip(decided.tolist(), num_accepted.tolist(), strict=True)]
        corrupted = _corrupted_seqs(~np.isfinite(largest), num_drafts)
        wanted = [seq.request.params.logprobs for seq in seqs]
        logprobs = step_logprobs(wanted, num_drafts, logits, token_ids)
        return list(map(Verified, token_ids, logprobs, corrupted))

    def _draft_logits(self, sampled: list[Round], drafts: Drafts | None) -> Tensor | None:
        """Return draft logits [S, k, Vd] of the sampled sequences for rejection; rows that did not draft are unread."""
        if not self._keep_draft_logits or drafts is None:
            return None
        assert drafts.logits is not None, "the drafter kept its logits"
        index = [0 if r.draft_row is None else r.draft_row for r in sampled]
        return drafts.logits[index]


def _pending_rows(seqs: list[Sequence], block_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return positions and KV slots of all pending tokens, end to end."""
    positions = [np.arange(seq.num_computed - seq.num_pending, seq.num_computed) for seq in seqs]
    slots = [
        np.array(seq.block_table)[rows // block_size] * block_size + rows % block_size
        for seq, rows in zip(seqs, positions, strict=True)
    ]
    return device_tensor(np.concatenate(positions), device), device_tensor(np.concatenate(slots), device)


def _merge(parts: list[Drafts], order: list[int]) -> Drafts:
    """Put drafts of several versions, one after another in `order`, back into the order of the step."""
    place = sorted(range(len(order)), key=order.__getitem__)  # where each sequence's drafts are
    token_ids = [row for part in parts for row in part.token_ids]
    confidence = [row for part in parts for row in part.signals.confidence]
    ratios = [part.signals.length_ratio for part in parts]
    ratio = [r for part in ratios if part is not None for r in part]
    logits = [part.logits for part in parts if part.logits is not None]
    return Drafts(
        [token_ids[i] for i in place],
        DraftSignals([confidence[i] for i in place], [ratio[i] for i in place] if ratio else None),
        torch.cat(logits)[place] if logits else None,
    )


def _entry(r: Round) -> PackEntry:
    seq, num_tokens = r.scheduled.seq, r.scheduled.num_tokens
    tokens = seq.token_ids[seq.num_computed : seq.num_computed + num_tokens] + r.draft_token_ids
    num_logits = len(r.draft_token_ids) + 1 if r.scheduled.samples else 0
    return PackEntry(tokens, seq.num_computed, seq.block_table, num_logits)


def _padded_drafts(sampled: list[Round], device: torch.device) -> Tensor:
    """Return [S, max drafts] int64 target-vocabulary ids, -1 where there is none."""
    width = max(len(r.draft_token_ids) for r in sampled)
    if width == 0:
        return torch.empty(len(sampled), 0, dtype=torch.int64, device=device)
    rows = [r.draft_token_ids + [-1] * (width - len(r.draft_token_ids)) for r in sampled]
    return device_tensor(np.array(rows, dtype=np.int64), device)


def _corrupted_seqs(corrupted: npt.NDArray[np.bool_], num_drafts: list[int]) -> list[bool]:
    """Return, for each sequence, whether any of its rows [R] is corrupted."""
    if not corrupted.any():
        return [False] * len(num_drafts)
    rows = np.split(corrupted, np.cumsum(np.array(num_drafts) + 1)[:-1])
    return [bool(part.any()) for part in rows]


def _verify_metadata(num_drafts: list[int], device: torch.device) -> VerifyMetadata:
    cu_rows = [0, *itertools.accumulate(count + 1 for count in num_drafts)]
    return VerifyMetadata(device_tensor(np.array(cu_rows, dtype=np.int64), device), num_drafts)
