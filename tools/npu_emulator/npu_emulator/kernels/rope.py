# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings in the three forms torch_npu has them."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_emulator.kernels.registry import kernel
from npu_emulator.limits import FLOATS, refuse, require, require_absent, require_contiguous, require_dtype


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _rotate_interleaved(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


_ROTATIONS = {"half": _rotate_half, "interleave": _rotate_interleaved}


def check_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> None:
    """Source: op-plugin docs, npu_rotary_mul, jit_compile=False; one dtype: aclnnRotaryPositionEmbedding."""
    name = "npu_rotary_mul"
    require_absent(name, rotate=rotate)
    require_dtype(name, "input", input, FLOATS)
    require(r1.dtype == r2.dtype == input.dtype, name, f"r1 and r2 must be {input.dtype}", (r1.dtype, r2.dtype))
    require(input.dim() in (3, 4), name, "input must have 3 (TND) or 4 axes", tuple(input.shape))
    head_dim = input.shape[-1]
    require(head_dim < 896 and head_dim % 2 == 0, name, "the last axis must be even and below 896", head_dim)
    small = input.shape[1:-1] if input.dim() == 3 else sorted(input.shape[:-1])[:2]
    require(all(size < 1000 for size in small), name, "batch size and heads must be below 1000", tuple(input.shape))
    require(rotary_mode in _ROTATIONS, name, f"rotary_mode must be one of {', '.join(_ROTATIONS)}", rotary_mode)
    fits = r1.shape == r2.shape and r1.dim() == input.dim() and r1.shape[-1] == head_dim
    fits = fits and all(mine in (1, size) for mine, size in zip(r1.shape, input.shape, strict=True))
    fits = fits and (input.dim() == 4 or r1.shape[0] == input.shape[0])
    require(fits, name, f"r1 and r2 must broadcast to {tuple(input.shape)}", (tuple(r1.shape), tuple(r2.shape)))


@kernel("npu_rotary_mul", "aclnnRotaryPositionEmbedding", "aclnnRotaryPositionEmbeddingV2", check=check_rotary_mul)
def rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Compute x * cos + rotate(x) * sin."""
    largest = max((float(r.abs().max()) for r in (r1, r2) if r.numel()), default=0.0)
    if largest > 1:
        refuse("npu_rotary_mul", "r1 and r2 must be in [-1, 1]", largest)
    x = input.float()
    return (x * r1.float() + _ROTATIONS[rotary_mode](x) * r2.float()).to(input.dtype)


@kernel("npu_rotary_mul_backward", "aclnnRotaryPositionEmbeddingGrad")
def rotary_mul_backward(
    grad: Tensor, self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, cos and sin; the rotation's transpose is its negative."""
    rotate = _ROTATIONS[rotary_mode]
    g, x = grad.float(), self.float()
    sums = tuple(i for i in range(g.dim()) if r1.shape[i] == 1 and g.shape[i] > 1)

    def fold(value: Tensor, like: Tensor) -> Tensor:
        return (value.sum(sums, keepdim=True) if sums else value).to(like.dtype)

    dx = (g * r1.float() - rotate(g * r2.float())).to(self.dtype)
    return dx, fold(g * x, r1), fold(g * rotate(x), r2)


def check_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> None:
    """Source: op-plugin docs, apply_rotary_pos_emb, Atlas A2 and A3."""
    name = "npu_apply_rotary_pos_emb"
    tensors = (query, key, cos, sin)
    require_dtype(name, "query", query, FLOATS)
    require(len({t.dtype for t in tensors}) == 1, name, "all tensors must have one dtype", [t.dtype for t in tensors])
    require(layout in ("BSND", "TND"), name, "layout must be BSND or TND", layout)
    require(rotary_mode == "half", name, "rotary_mode must be half", rotary_mode)
    shapes = [tuple(t.shape) for t in tensors]
    require(all(len(shape) == len(layout) for shape in shapes), name, f"{layout} has {len(layout)} axes", shapes)
    require(all(shape[-1] in (64, 128) for shape in shapes), name, "the last axis must be 64 or 128", shapes)
    require(all(t.numel() for t in tensors), name, "tensors must not be empty", shapes)
    rows = {shape[:-2] for shape in shapes}
    require(len(rows) == 1, name, "all tensors must have the same tokens", shapes)
    require(query.shape[-1] == key.shape[-1], name, "query and key must have one head size", shapes)
    require(shapes[2] == shapes[3] and cos.shape[-2] == 1, name, "cos and sin must have one head", shapes)
    require(cos.shape[-1] == query.shape[-1], name, "cos and sin must span the head", shapes)
    require_contiguous(name, query=query, key=key, cos=cos, sin=sin)


@kernel(
    "npu_apply_rotary_pos_emb", "aclnnApplyRotaryPosEmb", "aclnnApplyRotaryPosEmbV2", check=check_apply_rotary_pos_emb
)
def apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Rotates query and key IN PLACE and returns them, whatever the schema says: torch_npu's code does the same."""
    for x in (query, key):
        wide = x.float()
        x.copy_(wide * cos.float() + _rotate_half(wide) * sin.float())
    return query, key


def check_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: list[int] | None = None,
    rotary_mode: str = "half",
    cache_mode: str = "default",
) -> None:
    """Source: op-plugin docs, npu_mrope; only plain RoPE is emulated (no sections, or three zeros)."""
    name = "npu_mrope"
    if mrope_section and any(mrope_section):
        raise NotImplementedError(f"npu::{name}: mrope_section is not emulated")
    require_dtype(name, "query", query, FLOATS)
    same = query.dtype == key.dtype == cos_sin_cache.dtype
    require(same, name, "query, key and cos_sin_cache must have one dtype", (key.dtype, cos_sin_cache.dtype))
    require(positions.dtype in (torch.int32, torch.int64), name, "positions must be int32 or int64", positions.dtype)
    require(positions.dim() == 1, name, "positions must have one axis", tuple(positions.shape))
    unit = 16 if query.dtype == torch.float32 else 32
    rotary_dim = cos_sin_cache.shape[-1]
    sizes = (head_size, rotary_dim)
    require(
        not any(size % unit for size in sizes), name, f"head_size and rotary_dim must be multiples of {unit}", sizes
    )
    require(rotary_dim <= head_size, name, "rotary_dim must not be above head_size", sizes)
    for tensor in (query, key):
        fits = tensor.dim() == 2 and tensor.shape[0] == positions.shape[0] and tensor.shape[1] % head_size == 0
        require(fits, name, "query and key must be (num_tokens, num_heads * head_size)", tuple(tensor.shape))
    require(rotary_mode in ("half", "interleaved"), name, "rotary_mode must be half or interleaved", rotary_mode)
    require(cache_mode == "default", name, "cache_mode must be default without sections", cache_mode)


@kernel("npu_mrope", "aclnnRopeWithSinCosCache", "aclnnRopeWithSinCosCacheV2", check=check_mrope)
def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: list[int] | None = None,
    rotary_mode: str = "half",
    cache_mode: str = "default",
) -> tuple[Tensor, Tensor]:
    """Plain RoPE with cos and sin looked up by position; channels beyond rotary_dim pass through."""
    length = cos_sin_cache.shape[0]
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < length:
        refuse("npu_mrope", f"positions must be in [0, {length - 1}]", (int(positions.min()), int(positions.max())))
    cos, sin = cos_sin_cache[positions.long()].float().unsqueeze(1).chunk(2, -1)
    rotary_dim = cos_sin_cache.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        heads = x.float().reshape(x.shape[0], -1, head_size)
        turned, passed = heads[..., :rotary_dim], heads[..., rotary_dim:]
        half = rotary_mode == "half"
        first, second = turned.chunk(2, -1) if half else (turned[..., ::2], turned[..., 1::2])
        parts = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.cat(parts, -1) if half else torch.stack(parts, -1).flatten(-2)
        return torch.cat((turned, passed), -1).flatten(-2).to(x.dtype)

    return rotate(query), rotate(key)
