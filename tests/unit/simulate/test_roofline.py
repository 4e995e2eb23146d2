# SPDX-License-Identifier: Apache-2.0
"""Step times from the roofline, against numbers worked out by hand from published sizes."""

from __future__ import annotations

import numpy as np
import pytest

from adaflash.simulate.catalog import load_device, load_model
from adaflash.simulate.roofline import NO_PREFILL, PrefillWork, RooflineCosts

H200, QWEN = load_device("H200"), load_model("Qwen3-8B")
COSTS = RooflineCosts(H200, QWEN)
BYTES_PER_S, FLOPS = 4.8e12 * 0.88, 990e12 * 0.79
# Qwen3-8B: 36 layers of 41,943,040 attention and 150,994,944 MLP weights, and an LM head of 622,329,856.
LAYER_WEIGHTS, HEAD_WEIGHTS = 36 * (41_943_040 + 150_994_944), 622_329_856
DRAFT_LAYER_WEIGHTS = 5 * (41_943_040 + 150_994_944)


def verify_s(num_seqs: int, num_tokens: int, num_context: int, costs: RooflineCosts = COSTS) -> float:
    return float(costs.verify_s(num_seqs, np.array([num_tokens]), num_context)[0])


def draft_s(num_seqs: int, num_context: int, num_drafts: int = 15) -> float:
    return float(COSTS.draft_s(np.array([num_seqs]), num_context, num_drafts)[0])


def test_one_token_takes_the_time_to_read_the_weights() -> None:
    expected = 0.3e-3 + 2 * (LAYER_WEIGHTS + HEAD_WEIGHTS) / BYTES_PER_S
    assert expected == pytest.approx(3.88e-3, rel=1e-3)
    assert verify_s(1, 1, 0) == pytest.approx(expected, rel=1e-3)


def test_many_tokens_take_the_time_of_their_arithmetic() -> None:
    norms = 36 * 6 * 4096 * 2 * 4096 / BYTES_PER_S
    arithmetic = 2 * 4096 * (LAYER_WEIGHTS + HEAD_WEIGHTS) / FLOPS
    kv = 4096 * 147_456 / BYTES_PER_S
    assert verify_s(256, 4096, 0) == pytest.approx(0.3e-3 + norms + arithmetic + kv, rel=1e-6)


def test_context_takes_the_time_to_read_its_keys_and_values() -> None:
    added = verify_s(32, 32, 32 * 4096) - verify_s(32, 32, 0)
    assert added == pytest.approx(32 * 4096 * 147_456 / BYTES_PER_S, rel=1e-6)


def test_many_rows_over_a_context_take_the_time_of_attentions_arithmetic() -> None:
    longer = verify_s(32, 64 * 32, 32 * 8192) - verify_s(32, 64 * 32, 32 * 4096)
    assert longer == pytest.approx(36 * 4 * 4096 * (64 * 32 * 4096) / (FLOPS * 0.6), rel=1e-6)


def test_a_draft_reads_its_layers_and_the_lm_head() -> None:
    expected = 0.15e-3 + 2 * (DRAFT_LAYER_WEIGHTS + HEAD_WEIGHTS) / BYTES_PER_S
    assert draft_s(1, 0) == pytest.approx(expected, rel=1e-2)


def test_a_draft_of_many_takes_the_time_of_16_rows_through_its_layers_and_15_through_the_lm_head() -> None:
    layers, head = 2 * 256 * 16 * DRAFT_LAYER_WEIGHTS / FLOPS, 2 * 256 * 15 * HEAD_WEIGHTS / FLOPS
    norms = 5 * 6 * 4096 * 2 * 256 * 16 / BYTES_PER_S
    own_kv = 256 * 16 * 20_480 / BYTES_PER_S
    assert draft_s(256, 0) == pytest.approx(0.15e-3 + layers + head + norms + own_kv, rel=1e-6)


def test_a_narrow_draft_of_many_takes_the_time_of_its_own_rows() -> None:
    layers, head = 2 * 256 * 4 * DRAFT_LAYER_WEIGHTS / FLOPS, 2 * 256 * 3 * HEAD_WEIGHTS / FLOPS
    assert draft_s(256, 0, 3) == pytest.approx(0.15e-3 + layers + head, rel=0.15)
    assert draft_s(256, 0, 3) < 0.3 * draft_s(256, 0)


def test_drafting_for_nobody_costs_nothing() -> None:
    assert draft_s(0, 0) == 0.0
    assert float(COSTS.context_s(np.array([0]))[0]) == 0.0


def test_context_rows_read_the_projection_and_the_drafters_keys_and_values() -> None:
    num_weights = 4096 * 20_480 + 5 * 2 * 1024 * 4096
    assert float(COSTS.context_s(np.array([1]))[0]) == pytest.approx(2 * num_weights / BYTES_PER_S, rel=1e-3)
    assert float(COSTS.context_s(np.array([4096]))[0]) == pytest.approx(2 * 4096 * num_weights / FLOPS, rel=1e-6)


def test_a_mixture_reads_the_experts_its_tokens_touch() -> None:
    model = load_model("Qwen3-Coder-30B-A3B")
    costs = RooflineCosts(H200, model)
    expert_bytes = 2 * 48 * 3 * 2048 * 768
    one, two, many = (verify_s(n, n, 0, costs) for n in (1, 2, 128))
    assert one == pytest.approx(0.3e-3 + 2 * 3.35e9 / BYTES_PER_S - 2 * 2048 * 151_936 / BYTES_PER_S, rel=0.02)
    assert two - one == pytest.approx(8 * (1 - 8 / 128) * expert_bytes / BYTES_PER_S, rel=0.01)
    assert many - one == pytest.approx((128 * (1 - (1 - 1 / 16) ** 128) - 8) * expert_bytes / BYTES_PER_S, rel=0.02)


def test_prompt_chunks_cost_their_rows_and_their_own_pairs() -> None:
    chunk = PrefillWork(num_seqs=1, num_tokens=4096, num_context=0, num_pairs=4096 * 4097 // 2)
    plain = float(COSTS.step_s(8, np.array([8]), 8 * 1024, NO_PREFILL)[0])
    mixed = float(COSTS.step_s(8, np.array([8]), 8 * 1024, chunk)[0])
    rows = 2 * 4104 * LAYER_WEIGHTS / FLOPS - 2 * LAYER_WEIGHTS / BYTES_PER_S
    pairs = 36 * 4 * 4096 * (8 * 1024 + chunk.num_pairs) / (FLOPS * 0.6) - 8 * 1024 * 147_456 / BYTES_PER_S
    assert mixed - plain == pytest.approx(rows + pairs + 36 * 6 * 4096 * 2 * 4096 / BYTES_PER_S, rel=2e-3)


def test_many_sizes_at_once_are_those_one_by_one() -> None:
    sizes = np.array([8, 16, 300, 5000])
    together = COSTS.verify_s(8, sizes, 4096)
    assert together.tolist() == [verify_s(8, int(size), 4096) for size in sizes]
    assert (np.diff(together) > 0).all()
