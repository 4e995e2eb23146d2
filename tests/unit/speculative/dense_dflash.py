# SPDX-License-Identifier: Apache-2.0
"""DFlash as the paper states it, one sequence at a time: [context | block] concatenated, no paging, no shared code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


class DenseDFlash:
    """Reference drafter over plain tensors.

    Args:
        directory: Holds `config.json` and `model.safetensors` with canonical names.
    """

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.w: dict[str, Tensor] = load_file(directory / "model.safetensors")

    def hidden(self, taps: Tensor, block: Tensor) -> Tensor:
        """Return the final hidden states [W, H] of block embeddings [W, H] after context taps [C, T * H]."""
        context_len, width = len(taps), len(block)
        context = self._norm(taps @ self.w["fc.weight"].T, "hidden_norm")
        positions = torch.arange(context_len + width)
        h = block
        for index, kind in enumerate(self.config["layer_types"]):
            layer = f"layers.{index}."
            x = self._norm(h, f"{layer}input_layernorm")
            rows = torch.cat((context, x))
            q = self._rope(
                self._heads(x, f"{layer}self_attn.q_proj", f"{layer}self_attn.q_norm"), positions[context_len:]
            )
            k = self._rope(self._heads(rows, f"{layer}self_attn.k_proj", f"{layer}self_attn.k_norm"), positions)
            v = self._heads(rows, f"{layer}self_attn.v_proj", None)
            attended = self._attend(q, k, v, self._visible(kind, positions[context_len:], positions))
            h = h + self._linear(attended, f"{layer}self_attn.o_proj")
            x = self._norm(h, f"{layer}post_attention_layernorm")
            gated = F.silu(self._linear(x, f"{layer}mlp.gate_proj")) * self._linear(x, f"{layer}mlp.up_proj")
            h = h + self._linear(gated, f"{layer}mlp.down_proj")
        return self._norm(h, "norm")

    def _visible(self, kind: str, queries: Tensor, keys: Tensor) -> Tensor:
        sliding = kind == "sliding_attention"
        causal = self.config["dflash_config"].get("causal", sliding)
        visible = torch.ones(len(queries), len(keys), dtype=torch.bool)
        if causal:
            visible &= keys[None] <= queries[:, None]
        if sliding:
            visible &= keys[None] > queries[:, None] - self.config["sliding_window"]
        return visible

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        outputs = []
        groups = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // groups].T / self.config["head_dim"] ** 0.5
            outputs.append(scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v[:, head // groups])
        return torch.cat(outputs, dim=-1)

    def _heads(self, x: Tensor, projection: str, norm: str | None) -> Tensor:
        heads = self._linear(x, projection).reshape(len(x), -1, self.config["head_dim"])
        return heads if norm is None else self._norm(heads, norm)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.w[f"{name}.weight"].T
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale: Tensor = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / scale * self.w[f"{name}.weight"]

    def _rope(self, heads: Tensor, positions: Tensor) -> Tensor:
        dim = self.config["head_dim"]
        freq: Tensor = self.config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = (positions[:, None] * freq).repeat(1, 2)[:, None]
        first, second = heads.chunk(2, dim=-1)
        return heads * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
