# SPDX-License-Identifier: Apache-2.0
"""What a trainer always needs of the target: its embedding and its LM head, without the layers between them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash.errors import CheckpointError
from adaflash.models.checkpoint import Checkpoint
from adaflash.models.loader import read_model_config
from adaflash.ops.backend import Backend, LinearFn

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


class TargetHead:
    """Embedding and LM head of the target in `directory`; lends them to a drafter that computes in fp32.

    Args:
        directory: The target's checkpoint, of which two tensors are read at most.
        backend: Where they go; they are kept in the dtype it prefers for the checkpoint's.

    Attributes:
        config: The target's architecture.
        dtype: The drafter's, fp32.
        embedding: [V, H].
        weight: [V, H] of the LM head; the same tensor when they are tied.

    Raises:
        CheckpointError: See `read_model_config` and `Checkpoint`; or a tensor is missing or misshapen.
    """

    def __init__(self, directory: Path, backend: Backend) -> None:
        self.config = read_model_config(directory)
        self.dtype = torch.float32
        self._checkpoint, self._backend = Checkpoint(directory), backend
        self.embedding = self._read(EMBEDDING)
        self.weight = self.embedding if self.config.tie_word_embeddings else self._read(LM_HEAD)

    def _read(self, name: str) -> Tensor:
        entry, expected = self._checkpoint.entries.get(name), (self.config.vocab_size, self.config.hidden_size)
        if entry is None or entry.shape != expected:
            found = "missing" if entry is None else f"of shape {list(entry.shape)}"
            raise CheckpointError(
                f"checkpoint {self._checkpoint.directory}: tensor {name} is {found}: must be {list(expected)}"
            )
        return entry.read(self._backend.preferred_dtype(self.config.dtype), self._backend.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return token embeddings in fp32, [...] -> [..., H]."""
        return F.embedding(token_ids, self.embedding).to(self.dtype)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Apply the LM head, [R, H] -> [R, V] fp32."""
        return F.linear(hidden.to(self.weight.dtype), self.weight).to(self.dtype)

    def reduced_head(self, token_ids: Tensor) -> LinearFn:
        """Return the LM head restricted to `token_ids` [Vd], a function [R, H] -> [R, Vd] fp32."""
        rows = self.weight[token_ids].to(self.dtype)
        return lambda hidden: F.linear(hidden, rows)
