# SPDX-License-Identifier: Apache-2.0
"""Every operator of torch_npu that this backend calls; a call of any other fails the tests."""

from __future__ import annotations

REQUIRED_OPS = (
    "_npu_fused_infer_attention_score_get_max_workspace",
    "npu_add_rms_norm",
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score.out",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_scatter_pa_kv_cache",
    "npu_swiglu",
    "npu_top_k_top_p",
)
