# SPDX-License-Identifier: Apache-2.0
"""Turns the engine's sequences into `SamplingMetadata` each step; owns penalty counts, biases and stop-id bans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adaflash.engine.penalty_state import PenaltyState
from adaflash.ops.metadata import PenaltyMetadata, SamplingMetadata, SparseBias
from adaflash.request import SamplingParams

MIN_TEMPERATURE = 1e-5  # below it a request is greedy: logits / temperature would leave the range of fp32

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

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


class RowSpec(NamedTuple):
    """One row of logits to turn into a token.

    `output_index` is the index in the sequence's output of the token the row decides; `draft_prefix` holds the drafts
    between the committed output and that token (read only by sequences with penalties).
    """

    seq_key: int
    output_index: int
    draft_prefix: list[int]


class _SeqBias(NamedTuple):
    """Additive bias of one sequence: `logit_bias` always, -inf on the stop ids while output_index < min_tokens."""

    token_ids: IntArray  # logit_bias ids, then banned ids
    values: FloatArray
    num_always: int
    min_tokens: int

    def num_active(self, output_index: int) -> int:
        """Return how many leading entries apply to the token at `output_index`."""
        return len(self.token_ids) if output_index < self.min_tokens else self.num_always


class SamplingBuilder:
    """Per-sequence sampling constants in arrays, gathered into the rows of a step.

    Sequences are added when they start running and removed when they finish; preemption needs neither, since the
    committed output survives it. Metadata refers to the live penalty counts: use it before the next `commit`.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._constants = np.zeros(8, dtype=_CONSTANTS)
        self._seats: dict[int, int] = {}
        self._free_seats = list(range(7, -1, -1))
        self._biases: dict[int, _SeqBias] = {}
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
        if not self._free_seats:
            size = len(self._constants)
            self._constants = np.concatenate([self._constants, np.zeros(size, dtype=_CONSTANTS)])
            self._free_seats = list(range(2 * size - 1, size - 1, -1))
        seat = self._free_seats.pop()
        self._seats[seq_key] = seat
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
        bias = _sequence_bias(params, eos_ids)
        if bias is not None:
            self._biases[seq_key] = bias

    def commit(self, seq_key: int, new_token_ids: Sequence[int]) -> None:
        """Count tokens that became part of the sequence's output."""
        self._penalties.count(seq_key, new_token_ids)

    def remove(self, seq_key: int) -> None:
        """Forget a finished sequence and free its penalty counts."""
        seat = self._seats.pop(seq_key)
        self._num_sampled -= bool(self._constants["temperature"][seat] > 0)
        self._free_seats.append(seat)
        self._biases.pop(seq_key, None)
        self._penalties.release(seq_key)

    # ---- rows ------------------------------------------------------------------------------------------------

    def rows(self, rows: Sequence[RowSpec]) -> SamplingMetadata:
        """Return the metadata of target rows, in the given order."""
        if self._is_plain:
            return self._greedy(len(rows))
        seq_keys = [row.seq_key for row in rows]
        output_index = np.array([row.output_index for row in rows], dtype=np.int64)
        prefixes = [row.draft_prefix for row in rows] if self._penalties else None
        return self._assemble(seq_keys, output_index, prefixes, self._bias(seq_keys, output_index), None)

    def verify_rows(
        self,
        seq_keys: Sequence[int],
        output_indexes: Sequence[int],
        num_drafts: Sequence[int],
        draft_token_ids: Sequence[Sequence[int]],
    ) -> SamplingMetadata:
        """Return the metadata of one anchor row and `num_drafts[s]` draft rows per sequence, in `VerifyMetadata` order.

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
        starts = np.cumsum(counts) - counts
        offset = np.arange(num_rows, dtype=np.int64) - np.repeat(starts, counts)
        output_index = np.repeat(np.asarray(output_indexes, dtype=np.int64), counts) + offset
        row_keys = [key for key, count in zip(seq_keys, counts.tolist(), strict=True) for _ in range(count)]
        prefixes = None
        if self._penalties:
            tokens = [list(row) for row in draft_token_ids]
            prefixes = [tokens[s][:k] for s, count in enumerate(counts.tolist()) for k in range(count)]
        return self._assemble(row_keys, output_index, prefixes, self._bias(row_keys, output_index), None)

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
        ban = self._ban(num_rows, banned_token_id)
        if self._is_plain:
            greedy = self._greedy(num_rows)
            return greedy if ban is None and column_token_ids is None else _with_bias(greedy, ban, column_token_ids)
        steps = np.arange(num_drafts, dtype=np.int64)
        output_index = (np.asarray(output_indexes, dtype=np.int64)[:, None] + steps).reshape(-1)
        row_keys = [key for key in seq_keys for _ in range(num_drafts)]
        bias = _join(self._bias(row_keys, output_index), ban)
        return self._assemble(row_keys, output_index, None, bias, column_token_ids)

    @property
    def _is_plain(self) -> bool:
        """Whether every registered sequence is greedy, without penalties or bias."""
        return not (self._num_sampled or self._biases or self._penalties)

    def _greedy(self, num_rows: int) -> SamplingMetadata:
        cached = self._greedy_cache.get(num_rows)
        if cached is None:
            cached = self._greedy_cache[num_rows] = SamplingMetadata.greedy(num_rows, self._device)
        return cached

    def _assemble(
        self,
        row_keys: Sequence[int],
        output_index: IntArray,
        prefixes: list[list[int]] | None,
        bias: SparseBias | None,
        column_token_ids: Tensor | None,
    ) -> SamplingMetadata:
        seats = np.fromiter(map(self._seats.__getitem__, row_keys), dtype=np.int64, count=len(row_keys))
        rows = self._constants[seats]  # [R] records
        sampled = rows["temperature"] > 0
        return SamplingMetadata(
            all_greedy=not sampled.any(),
            temperature=self._tensor(rows["temperature"]),
            top_k=self._tensor(rows["top_k"]) if (sampled & (rows["top_k"] > 0)).any() else None,
            top_p=self._tensor(rows["top_p"]) if (sampled & (rows["top_p"] < 1)).any() else None,
            min_p=self._tensor(rows["min_p"]) if (sampled & (rows["min_p"] > 0)).any() else None,
            seed=self._tensor(rows["seed"]),
            sample_index=self._tensor(rows["sample_index"]),
            output_index=self._tensor(output_index),
            penalties=self._penalty_rows(rows, prefixes) if (rows["penalty_slot"] >= 0).any() else None,
            bias=bias,
            column_token_ids=column_token_ids,
        )

    def _penalty_rows(self, rows: npt.NDArray[np.void], prefixes: list[list[int]] | None) -> PenaltyMetadata:
        width = max(map(len, prefixes), default=0) if prefixes is not None else 0
        prefix = np.full((len(rows), max(width, 1)), -1, dtype=np.int64)
        if prefixes is not None and width:
            for row in np.flatnonzero(rows["penalty_slot"] >= 0).tolist():
                prefix[row, : len(prefixes[row])] = prefixes[row]
        return PenaltyMetadata(
            slot=self._tensor(rows["penalty_slot"]),
            output_counts=self._penalties.output_counts,
            prompt_mask=self._penalties.prompt_mask,
            draft_prefix=self._tensor(prefix),
            repetition=self._tensor(rows["repetition"]),
            presence=self._tensor(rows["presence"]),
            frequency=self._tensor(rows["frequency"]),
        )

    def _bias(self, row_keys: Sequence[int], output_index: IntArray) -> SparseBias | None:
        if not self._biases:
            return None
        found: list[tuple[int, _SeqBias, int]] = []
        for row, (key, index) in enumerate(zip(row_keys, output_index.tolist(), strict=True)):
            bias = self._biases.get(key)
            if bias is not None and (count := bias.num_active(index)):
                found.append((row, bias, count))
        if not found:
            return None
        counts = [count for _, _, count in found]
        row_ids = np.repeat(np.array([row for row, _, _ in found], dtype=np.int64), counts)
        token_ids = np.concatenate([bias.token_ids[:count] for _, bias, count in found])
        values = np.concatenate([bias.values[:count] for _, bias, count in found])
        return SparseBias(self._tensor(row_ids), self._tensor(token_ids), self._tensor(values))

    def _ban(self, num_rows: int, token_id: int | None) -> SparseBias | None:
        """Return -inf on `token_id` in every row."""
        if token_id is None:
            return None
        cached = self._ban_cache.get((num_rows, token_id))
        if cached is None:
            rows = torch.arange(num_rows, device=self._device)
            values = torch.full((num_rows,), float("-inf"), device=self._device)
            cached = SparseBias(rows, torch.full_like(rows, token_id), values)
            self._ban_cache[num_rows, token_id] = cached
        return cached

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _sequence_bias(params: SamplingParams, eos_ids: Sequence[int]) -> _SeqBias | None:
    always = params.logit_bias or {}
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)} if params.min_tokens else set()
    if not always and not stop_ids:
        return None
    token_ids = np.array([*always, *sorted(stop_ids)], dtype=np.int64)
    values = np.array([*always.values(), *[-np.inf] * len(stop_ids)], dtype=np.float32)
    return _SeqBias(token_ids, values, len(always), params.min_tokens)


def _join(first: SparseBias | None, second: SparseBias | None) -> SparseBias | None:
    if first is None or second is None:
        return first or second
    return SparseBias(*(torch.cat(pair) for pair in zip(first, second, strict=True)))


def _with_bias(greedy: SamplingMetadata, bias: SparseBias | None, column_token_ids: Tensor | None) -> SamplingMetadata:
    return SamplingMetadata(
        True,
        greedy.temperature,
        None,
        None,
        None,
        greedy.seed,
        greedy.sample_index,
        greedy.output_index,
        bias=bias,
        column_token_ids=column_token_ids,
    )
