# SPDX-License-Identifier: Apache-2.0
"""Additive biases of the running sequences in flat arrays: `logit_bias`, and -inf on stop ids until `min_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adaflash.request import SamplingParams

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class BiasRows(NamedTuple):
    """Host side of `SparseBias`: three arrays [B]."""

    rows: IntArray
    token_ids: IntArray
    values: FloatArray


class _Entry(NamedTuple):
    token_ids: IntArray  # logit_bias ids, then ids banned before min_tokens
    values: FloatArray
    num_always: int
    min_tokens: int


class BiasTable:
    """One entry per seat that has a bias; truthy while any is held."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._flat: tuple[npt.NDArray[np.int64], IntArray, FloatArray] | None = None  # per seat, then per bias

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, seat: int, params: SamplingParams, eos_ids: Sequence[int]) -> None:
        """Register the seat's biases, if it has any."""
        always = params.logit_bias or {}
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)} if params.min_tokens else set()
        if not always and not stop_ids:
            return
        token_ids = np.array([*always, *sorted(stop_ids)], dtype=np.int64)
        values = np.array([*always.values(), *[-np.inf] * len(stop_ids)], dtype=np.float32)
        self._entries[seat] = _Entry(token_ids, values, len(always), params.min_tokens)
        self._flat = None

    def remove(self, seat: int) -> None:
        """Forget the seat."""
        if self._entries.pop(seat, None) is not None:
            self._flat = None

    def rows(self, seats: IntArray, output_index: IntArray) -> BiasRows | None:
        """Return the biases of rows [R] at these seats and output indexes; None when no row has one."""
        if not self._entries:
            return None
        per_seat, token_ids, values = self._flatten(int(seats.max(initial=0)))
        start, num_always, num_all, min_tokens = per_seat[:, seats]
        counts = np.where(output_index < min_tokens, num_all, num_always)
        total = int(counts.sum())
        if not total:
            return None
        within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        source = np.repeat(start, counts) + within
        return BiasRows(np.repeat(np.arange(len(seats)), counts), token_ids[source], values[source])

    def _flatten(self, max_seat: int) -> tuple[npt.NDArray[np.int64], IntArray, FloatArray]:
        """Return [4, seats] of (start, num_always, num_all, min_tokens), and all entries laid end to end."""
        if self._flat is None or self._flat[0].shape[1] <= max_seat:
            per_seat = np.zeros((4, max(max_seat, *self._entries) + 1), dtype=np.int64)
            start = 0
            for seat, entry in self._entries.items():
                per_seat[:, seat] = start, entry.num_always, len(entry.token_ids), entry.min_tokens
                start += len(entry.token_ids)
            entries = self._entries.values()
            token_ids = np.concatenate([entry.token_ids for entry in entries])
            self._flat = per_seat, token_ids, np.concatenate([entry.values for entry in entries])
        return self._flat
