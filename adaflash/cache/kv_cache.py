# SPDX-License-Identifier: Apache-2.0
"""Device tensors of the paged KV pool, one pair per layer; which block belongs to whom is `block_manager`'s."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adaflash.ops.backend import Backend


@dataclass(frozen=True)
class KVCache:
    """Keys and values of one model (target or drafter); both use the same block numbers.

    Attributes:
        k: Per layer, shape `Backend.kv_cache_shape`.
        v: Per layer, same shape.
        block_size: Tokens per block.
    """

    k: list[Tensor]
    v: list[Tensor]
    block_size: int

    @staticmethod
    def allocate(
        backend: Backend,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> KVCache:
        """Allocate zeroed caches for `num_layers` layers."""
        shape = backend.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_dim)
        k, v = ([_zeros(shape, dtype, backend.device) for _ in range(num_layers)] for _ in range(2))
        return KVCache(k, v, block_size)

    def copy_blocks(self, backend: Backend, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks `(source, destination)` in every layer."""
        for k, v in zip(self.k, self.v, strict=True):
            backend.copy_blocks(k, v, pairs)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU their pages take memory only once they are written (`torch.zeros` writes them all)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    buffer = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(buffer).view(dtype).view(shape)


def kv_bytes_per_block(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes one block takes over all layers, keys and values together."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize
