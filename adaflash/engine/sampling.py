# SPDX-License-Identifier: Apache-2.0
"""Turns the engine's sequences into `SamplingMetadata` each step; owns penalty counts, biases and stop-id bans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adaflash.engine.bias_table import BiasTable, IntArray
from adaflash.engine.penalty_state import PenaltyState
from adaflash.ops.metadata import PenaltyMetadata, SamplingMetadata, SparseBias, device_tensor
from adaflash.request import SamplingParams

MIN_TEMPERATURE = 1e-5  # below it a request is greedy: logits / temperature would leave the range of fp32

_CONSTANTS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.int64),
        ("sample_index", np.int64),
        ("penalty_slot", np.int64),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
    ]
)


class SamplingBuilder:
    """Per-sequence sampling constants in arrays, gathered into the rows of a step.

    Sequences are added when they start running and removed when they finish; preemption needs neither, since the
    committed output survives it. Metadata refers to the live penalty counts: use it before the next `commit`.

    Args:
        vocab_size: V of the target.
        device: Where the metadata goes.
        draft_top_k: Draw drafts from this many likeliest tokens only, at a fraction of the noise. Lossless and next to
            free in acceptance under the coupling `gumbel`; must be None under `rejection`, where the filters of the
            target's rows have to give the drafts' q.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", draft_top_k: int | None = None) -> None:
        self._device = torch.device(device)
        self._draft_top_k = draft_top_k
        self._constants = np.zeros(8, dtype=_CONSTANTS)
        self._seats: dict[int, int] = {}
        self._free_seats = list(range(7, -1, -1))
        self._biases = BiasTable()
        self._penalties = PenaltyState(vocab_size, self._device)
        self._num_sampled = 0
        self._greedy_cache: dict[int, SamplingMetadata] = {}
        self._ban_cache: dict[tuple[int, int], SparseBias] = {}

    # ---- sequences -------------------------------------------------------------------------------------------

    def add(
        self,
        seq_key: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        sample_index: int,
        eos_ids: Sequence[int],
    ) -> None:
        """Register a sequence before its first row.

        Args:
            seq_key: Unique among the registered sequences.
            prompt_ids: The prompt; read only when the sequence has a repetition penalty.
            params: The request's parameters; `params.seed` is ignored.
            seed: The resolved seed, in [0, 2**63).
            sample_index: Which of the request's n samples.
            eos_ids: The model's own stop ids.
        """
        assert seq_key not in self._seats, f"sequence {seq_key} is already registered"
        seat = self._seats[seq_key] = self._take_seat()
        temperature = params.temperature if params.temperature >= MIN_TEMPERATURE else 0.0
        slot = self._penalties.acquire(seq_key, prompt_ids) if params.has_penalties else -1
        self._constants[seat] = (
            temperature,
            max(params.top_k, 0),
            params.top_p,
            params.min_p,
            seed,
            sample_index,
            slot,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self._num_sampled += temperature > 0
        self._biases.add(seat, params, eos_ids)

    def _take_seat(self) -> int:
        if not self._free_seats:
            size = len(self._constants)
            self._constants = np.concatenate([self._constants, np.zeros(size, dtype=_CONSTANTS)])
            self._free_seats = list(range(2 * size - 1, size - 1, -1))
        return self._free_seats.pop()

    def __contains__(self, seq_key: int) -> bool:
        return seq_key in self._seats

    def commit(self, seq_key: int, new_token_ids: Sequence[int]) -> None:
        """Count tokens that became part of the sequence's output."""
        self._penalties.count(seq_key, new_token_ids)

    def remove(self, seq_key: int) -> None:
        """Forget a finished sequence and free its penalty counts."""
        seat = self._seats.pop(seq_key)
        self._num_sampled -= bool(self._constants["temperature"][seat] > 0)
        self._free_seats.append(seat)
        self._biases.remove(seat)
        self._penalties.release(seq_key)

    # ---- rows ------------------------------------------------------------------------------------------------

    def verify_rows(
        self,
        seq_keys: Sequence[int],
        output_indexes: Sequence[int],
        num_drafts: Sequence[int],
        draft_token_ids: Sequence[Sequence[int]],
    ) -> SamplingMetadata:
        """Return the metadata of one anchor row and `num_drafts[s]` draft rows per sequence, as in `VerifyMetadata`.

        Args:
            seq_keys: [S] sequences.
            output_indexes: [S] output index the anchor row decides.
            num_drafts: [S] verified drafts c_s, 0 for plain decoding.
            draft_token_ids: [S] lists of at least c_s drafts; read only when a sequence has penalties.
        """
        counts = np.asarray(num_drafts, dtype=np.int64) + 1
        num_rows = int(counts.sum())
        if self._is_plain:
            return self._greedy(num_rows)
        offset = np.arange(num_rows) - np.repeat(np.cumsum(counts) - counts, counts)
        output_index = np.repeat(np.asarray(output_indexes, dtype=np.int64), counts) + offset
        prefix = None
        if self._penalties:
            drafts = _pad(draft_token_ids)  # [S, K']
            prefix = np.repeat(drafts, counts, axis=0)
            prefix[np.arange(drafts.shape[1]) >= offset[:, None]] = -1
        return self._assemble(np.repeat(self._seats_of(seq_keys), counts), output_index, prefix)

    def draft_rows(
        self,
        seq_keys: Sequence[int],
        output_indexes: Sequence[int],
        num_drafts: int,
        column_token_ids: Tensor | None,
        banned_token_id: int | None,
    ) -> SamplingMetadata:
        """Return the metadata of K draft rows per sequence: row s * K + k decides output index `output_indexes[s] + k`.

        Penalties see the committed output only, as the drafts of a block are drawn at once.

        Args:
            seq_keys: [S] sequences.
            output_indexes: [S] output index of each sequence's first draft.
            num_drafts: K.
            column_token_ids: [Vd] target ids of a reduced draft vocabulary, or None.
            banned_token_id: Target id no draft may be (the drafter's mask id), or None.
        """
        num_rows = len(seq_keys) * num_drafts
        ban = None if banned_token_id is None else self._ban(num_rows, banned_token_id)
        if self._is_plain:
            return replace(self._greedy(num_rows), bias=ban, column_token_ids=column_token_ids)
        output_index = np.add.outer(np.asarray(output_indexes, dtype=np.int64), np.arange(num_drafts)).reshape(-1)
        rows = self._assemble(np.repeat(self._seats_of(seq_keys), num_drafts), output_index, None)
        top_k = rows.top_k
        if self._draft_top_k is not None and not rows.all_greedy:
            limit = torch.full((num_rows,), self._draft_top_k, dtype=torch.int32, device=self._device)
            top_k = limit if top_k is None else torch.where(top_k > 0, top_k, limit).minimum(limit)
        return replace(rows, top_k=top_k, bias=_join(rows.bias, ban), column_token_ids=column_token_ids)

    @property
    def _is_plain(self) -> bool:
        """Whether every registered sequence is greedy, without penalties or bias."""
        return not (self._num_sampled or self._biases or self._penalties)

    def _greedy(self, num_rows: int) -> SamplingMetadata:
        cached = self._greedy_cache.get(num_rows)
        if cached is None:
            cached = self._greedy_cache[num_rows] = SamplingMetadata.greedy(num_rows, self._device)
        return cached

    def _seats_of(self, seq_keys: Sequence[int]) -> IntArray:
        return np.fromiter(map(self._seats.__getitem__, seq_keys), dtype=np.int64, count=len(seq_keys))

    def _assemble(self, seats: IntArray, output_index: IntArray, draft_prefix: IntArray | None) -> SamplingMetadata:
        rows = self._constants[seats]  # [R] records
        sampled = rows["temperature"] > 0
        bias = self._biases.rows(seats, output_index)
        return SamplingMetadata(
            all_greedy=not sampled.any(),
            temperature=self._tensor(rows["temperature"]),
            top_k=self._tensor(rows["top_k"]) if (sampled & (rows["top_k"] > 0)).any() else None,
            top_p=self._tensor(rows["top_p"]) if (sampled & (rows["top_p"] < 1)).any() else None,
            min_p=self._tensor(rows["min_p"]) if (sampled & (rows["min_p"] > 0)).any() else None,
            seed=self._tensor(rows["seed"]),
            sample_index=self._tensor(rows["sample_index"]),
            output_index=self._tensor(output_index),
            penalties=self._penalty_rows(rows, draft_prefix) if (rows["penalty_slot"] >= 0).any() else None,
            bias=None if bias is None else SparseBias(*(self._tensor(array) for array in bias)),
        )

    def _penalty_rows(self, rows: npt.NDArray[np.void], draft_prefix: IntArray | None) -> PenaltyMetadata:
        if draft_prefix is None or not draft_prefix.shape[1]:
            draft_prefix = np.full((len(rows), 1), -1, dtype=np.int64)
        return PenaltyMetadata(
            slot=self._tensor(rows["penalty_slot"]),
            output_counts=self._penalties.output_counts,
            prompt_mask=self._penalties.prompt_mask,
            draft_prefix=self._tensor(draft_prefix),
            repetition=self._tensor(rows["repetition"]),
            presence=self._tensor(rows["presence"]),
            frequency=self._tensor(rows["frequency"]),
        )

    def _ban(self, num_rows: int, token_id: int) -> SparseBias:
        """Return -inf on `token_id` in every row."""
        cached = self._ban_cache.get((num_rows, token_id))
        if cached is None:
            rows = torch.arange(num_rows, device=self._device)
            values = torch.full((num_rows,), float("-inf"), device=self._device)
            cached = self._ban_cache[num_rows, token_id] = SparseBias(rows, torch.full_like(rows, token_id), values)
        return cached

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return device_tensor(array.copy(), self._device)


def _pad(lists: Sequence[Sequence[int]]) -> IntArray:
    """Return the lists as rows of one matrix, filled up with -1."""
    lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
    padded = np.full((len(lists), int(lengths.max(initial=0))), -1, dtype=np.int64)
    inside = np.arange(padded.shape[1]) < lengths[:, None]
    padded[inside] = np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=int(lengths.sum()))
    return padded


def _join(first: SparseBias | None, second: SparseBias | None) -> SparseBias | None:
    if first is None or second is None:
        return first or second
    return SparseBias(*(torch.cat(pair) for pair in zip(first, second, strict=True)))
