# SPDX-License-Identifier: Apache-2.0
"""Shapes of one step: the packed batch, attention lengths, sampling and verification rows. Owns no state.

Letters: T packed tokens, S sequences, R rows whose logits are needed, W draft block size, K = W - 1 drafts,
V vocabulary, H hidden, Hq/Hkv heads, D head_dim. Every length exists on the device and on the host (`*_cpu`),
because CUDA kernels read the first and CANN operators take the second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """Sequences of different query lengths laid end to end; built by `speculative.packing`.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, absolute positions of the tokens in their sequences.
        slot_mapping: [T] int64, KV slot (block * block_size + offset) each token writes; all distinct.
        cu_seqlens_q: [S + 1] int32, prefix sums of the query lengths.
        seq_lens: [S] int32, KV length of each sequence including this step's tokens.
        block_tables: [S, max_blocks] int32, padded with 0.
        logits_indices: [R] int64, rows of T whose logits are needed.
        query_lens_cpu: Query length of each sequence.
        seq_lens_cpu: Host copy of `seq_lens`.
        block_tables_cpu: Host copy of the block tables, unpadded: ceil(seq_len / block_size) entries or more.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    logits_indices: Tensor
    query_lens_cpu: list[int]
    seq_lens_cpu: list[int]
    block_tables_cpu: list[list[int]]

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.query_lens_cpu)

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.query_lens_cpu)

    def first(self, num_seqs: int) -> PackedBatch:
        """Return the first sequences, all of whose rows have logits."""
        query_lens = self.query_lens_cpu[:num_seqs]
        num_tokens = sum(query_lens)
        return replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            slot_mapping=self.slot_mapping[:num_tokens],
            cu_seqlens_q=self.cu_seqlens_q[: num_seqs + 1],
            seq_lens=self.seq_lens[:num_seqs],
            block_tables=self.block_tables[:num_seqs],
            logits_indices=self.logits_indices[:num_tokens],
            query_lens_cpu=query_lens,
            seq_lens_cpu=self.seq_lens_cpu[:num_seqs],
            block_tables_cpu=self.block_tables_cpu[:num_seqs],
        )


@dataclass(frozen=True)
class AttentionMetadata:
    """What `paged_attention` needs of a batch; a backend may return a subclass with prepared device state."""

    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    query_lens_cpu: list[int]
    seq_lens_cpu: list[int]
    block_tables_cpu: list[list[int]]


class NormOutput(NamedTuple):
    """Result of `rms_norm`: the normed values, and the sum `x + residual` that was normed."""

    normed: Tensor
    residual: Tensor


@dataclass(frozen=True)
class PenaltyMetadata:
    """Token counts behind repetition, presence and frequency penalties.

    Row r is penalised with the counts of `slot[r]` plus one for each valid id in `draft_prefix[r]`: the drafts
    before row r in its block, which are part of the output whenever row r is reached.

    Attributes:
        slot: [R] int64, row of `output_counts` / `prompt_mask`; -1 leaves the row unpenalised.
        output_counts: [P, V] int32, occurrences in the committed output.
        prompt_mask: [P, V] bool, tokens present in the prompt.
        draft_prefix: [R, K] int64 target-vocabulary ids, -1 where there is none.
        repetition: [R] fp32, 1 is neutral.
        presence: [R] fp32, 0 is neutral.
        frequency: [R] fp32, 0 is neutral.
    """

    slot: Tensor
    output_counts: Tensor
    prompt_mask: Tensor
    draft_prefix: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


class SparseBias(NamedTuple):
    """Values added to single logits: `logit_bias`, and -inf for stop ids before `min_tokens` or the mask id.

    `rows` [B] int64 in [0, R), `token_ids` [B] int64 target-vocabulary ids, `values` [B] fp32.
    """

    rows: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class SamplingMetadata:
    """How each of R rows of logits becomes a token. None means no row uses the feature.

    The noise of a row is Philox4x32-10 with key = `seed` and counter = (token id // 4, output_index, sample_index,
    stream), so that the token at an output index depends on the target alone, never on drafts or batch.

    Attributes:
        all_greedy: Whether every row has temperature 0; then only penalties and bias are read.
        temperature: [R] fp32, 0 is greedy.
        top_k: [R] int32, 0 keeps all; None if all rows keep all.
        top_p: [R] fp32; None if all rows are 1.
        min_p: [R] fp32; None if all rows are 0.
        seed: [R] int64.
        sample_index: [R] int64, which of a request's n samples.
        output_index: [R] int64, index in the output of the token the row decides.
        penalties: Counts behind the penalties.
        bias: Sparse additive bias.
        column_token_ids: [Vd] int64, target-vocabulary id of each logits column, for a reduced draft vocabulary;
            None when columns are target ids.
    """

    all_greedy: bool
    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    seed: Tensor
    sample_index: Tensor
    output_index: Tensor
    penalties: PenaltyMetadata | None = None
    bias: SparseBias | None = None
    column_token_ids: Tensor | None = None

    @staticmethod
    def greedy(num_rows: int, device: torch.device | str = "cpu") -> SamplingMetadata:
        """Metadata of `num_rows` plain greedy rows."""
        zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
        temperature = torch.zeros(num_rows, dtype=torch.float32, device=device)
        return SamplingMetadata(True, temperature, None, None, None, zeros, zeros, zeros)


@dataclass(frozen=True)
class VerifyMetadata:
    """Which logits rows belong to which sequence: rows `cu_rows[s] .. cu_rows[s+1]`, one anchor row, then c_s drafts.

    Attributes:
        cu_rows: [S + 1] int64 prefix sums of c_s + 1.
        num_drafts_cpu: c_s per sequence.
    """

    cu_rows: Tensor
    num_drafts_cpu: list[int]


class VerifyOutput(NamedTuple):
    """Result of `verify_drafts`.

    `token_ids` [S, max(c) + 1] int64: row s holds the accepted drafts, then the bonus token, then padding -1.
    `num_accepted` [S] int64 in [0, c_s]; num_accepted + 1 tokens are emitted.
    """

    token_ids: Tensor
    num_accepted: Tensor


def device_tensor(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Return the array's values on `device`; on the CPU the tensor shares its memory.

    Elsewhere they go by way of pinned memory: from other memory the copy would wait for all that the device has to do.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
