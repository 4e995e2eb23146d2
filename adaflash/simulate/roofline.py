# SPDX-License-Identifier: Apache-2.0
"""Seconds of a target step and of a draft step from a device's roofline: a stand-in where none could be measured.

A step is a fixed time plus the sum over its parts of max(bytes / bandwidth, FLOPs / FLOP/s); parts do not overlap.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adaflash.simulate.catalog import Device, DrafterShape, Model, attention_weights

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_NORM_VALUES = 6  # values a row's two norms and residual additions read and write per layer, in units of H


class PrefillWork(NamedTuple):
    """Prompt chunks that run in a step.

    Attributes:
        num_seqs: Sequences with a chunk.
        num_tokens: Their rows; one of each chunk gets logits.
        num_context: Tokens before the chunks, all sequences together.
        num_pairs: (query, key) pairs of their attention.
    """

    num_seqs: int = 0
    num_tokens: int = 0
    num_context: int = 0
    num_pairs: int = 0


NO_PREFILL = PrefillWork()


class RooflineCosts:
    """Costs of a model on a device.

    Args:
        device: Where.
        model: What.
    """

    def __init__(self, device: Device, model: Model) -> None:
        self._device, self._model = device, model

    def verify_s(self, num_seqs: int, num_tokens: IntArray, num_context: int) -> FloatArray:
        """Return the seconds of a target step over decoding sequences, for each number of rows.

        Args:
            num_seqs: Sequences.
            num_tokens: [N] rows of all sequences together: anchors and drafts.
            num_context: Tokens in the KV cache before them, of all sequences together.
        """
        return self.step_s(num_seqs, num_tokens, num_context, NO_PREFILL)

    def step_s(self, num_seqs: int, num_tokens: IntArray, num_context: int, prefill: PrefillWork) -> FloatArray:
        """Return the same for steps that have prompt chunks besides."""
        model = self._model
        rows = np.asarray(num_tokens, dtype=np.float64)
        all_rows = rows + prefill.num_tokens
        pairs = rows * (num_context / max(num_seqs, 1)) + prefill.num_pairs
        layer = (
            self._linear(attention_weights(model), all_rows, _attention_values(model))
            + (self._experts(all_rows) if model.num_experts else self._mlp(model, all_rows))
            + self._bytes_s(_NORM_VALUES * model.hidden_size * all_rows)
            + self._attention(model, num_context + prefill.num_context + all_rows, pairs)
        )
        logits = self._logits(model.hidden_size, model.vocab_size, rows + prefill.num_seqs)
        return np.asarray(self._device.fixed_s + model.num_layers * layer + logits)

    def draft_s(self, num_seqs: IntArray, num_context: IntArray | int, num_drafts: IntArray | int) -> FloatArray:
        """Return the seconds of a draft step, 0 where nothing is drafted; arguments broadcast.

        Args:
            num_seqs: Drafting sequences.
            num_context: Tokens in the drafter's cache that are read, of all sequences together.
            num_drafts: Drafts of each sequence.
        """
        drafter = self._model.drafter
        seqs = np.asarray(num_seqs, dtype=np.float64)
        width = np.asarray(num_drafts) + 1
        rows = seqs * width
        pairs = width * (np.asarray(num_context) + rows)
        layer = (
            self._linear(attention_weights(drafter), rows, _attention_values(drafter))
            + self._mlp(drafter, rows)
            + self._bytes_s(_NORM_VALUES * drafter.hidden_size * rows)
            + self._attention(drafter, np.asarray(num_context) + rows, pairs)
        )
        logits = self._logits(drafter.hidden_size, drafter.vocab_size, seqs * (width - 1))
        seconds = self._device.draft_fixed_s + drafter.num_layers * layer + logits
        return np.where(seqs > 0, seconds, 0.0)

    def context_s(self, num_rows: IntArray) -> FloatArray:
        """Return the seconds of making the drafter's K and V of so many rows from the tapped features, [N] -> [N]."""
        drafter, rows = self._model.drafter, np.asarray(num_rows, dtype=np.float64)
        hidden, kv = drafter.hidden_size, 2 * drafter.num_kv_heads * drafter.head_dim
        num_weights = drafter.num_taps * hidden * hidden + drafter.num_layers * hidden * kv
        values_per_row = (drafter.num_taps + 2) * hidden + drafter.num_layers * kv
        return np.where(rows > 0, self._linear(num_weights, rows, values_per_row), 0.0)

    # ---- parts -----------------------------------------------------------------------------------------------

    def _linear(self, num_weights: float, rows: FloatArray, values_per_row: float) -> FloatArray:
        """Matmuls of `num_weights` weights that read and write `values_per_row` activations per row."""
        return self._slower(num_weights + values_per_row * rows, 2 * num_weights * rows)

    def _mlp(self, shape: Model | DrafterShape, rows: FloatArray) -> FloatArray:
        hidden, inner = shape.hidden_size, shape.intermediate_size
        return self._linear(3 * hidden * inner, rows, 2 * hidden + 3 * inner)

    def _experts(self, rows: FloatArray) -> FloatArray:
        """The router and the experts that are touched: E (1 - (1 - k / E)^rows) of them if routing is uniform."""
        model = self._model
        expert, router = 3 * model.hidden_size * model.intermediate_size, model.hidden_size * model.num_experts
        share = model.num_experts_per_token / model.num_experts
        touched = model.num_experts * (1 - (1 - share) ** rows)
        values = 2 * model.hidden_size + 3 * model.intermediate_size * model.num_experts_per_token
        flops = 2 * rows * (router + model.num_experts_per_token * expert)
        return self._slower(router + touched * expert + values * rows, flops)

    def _attention(self, shape: Model | DrafterShape, num_keys: FloatArray, num_pairs: FloatArray) -> FloatArray:
        """Reads every sequence's K and V once, whatever its rows; two products per pair and head."""
        arithmetic_s = 4 * shape.num_heads * shape.head_dim * num_pairs
        arithmetic_s = arithmetic_s / (self._device.flops * self._device.attention_fraction)
        return np.maximum(self._bytes_s(2 * shape.num_kv_heads * shape.head_dim * num_keys), arithmetic_s)

    def _logits(self, hidden: int, num_columns: int, rows: FloatArray) -> FloatArray:
        """The LM head, whose output is written and read again to be sampled from."""
        return self._linear(hidden * num_columns, rows, hidden + 2 * num_columns)

    def _slower(self, num_values: FloatArray, flops: FloatArray) -> FloatArray:
        return np.maximum(self._bytes_s(num_values), flops / self._device.flops)

    def _bytes_s(self, num_values: FloatArray) -> FloatArray:
        return np.asarray(num_values * self._device.value_bytes / self._device.bytes_per_s)


def _attention_values(shape: Model | DrafterShape) -> int:
    """Activations per row: hidden in and out, Q, K, V and attention's output."""
    return 2 * shape.hidden_size + 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
