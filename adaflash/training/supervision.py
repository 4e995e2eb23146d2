# SPDX-License-Identifier: Apache-2.0
"""What the target says about a trajectory: its features, as captured while serving or from its own forward here."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adaflash.cache.kv_cache import KVCache
from adaflash.errors import WeightError
from adaflash.models.base import TargetModel
from adaflash.models.loader import load_target
from adaflash.ops.backend import Backend
from adaflash.speculative.packing import PackEntry, pack
from adaflash.training.blocks import TrainingSequence
from adaflash.training.row_losses import top1_token_ids
from adaflash.training.target_head import EMBEDDING, LM_HEAD, TargetHead
from adaflash.training.trajectories import Trajectory

logger = logging.getLogger(__name__)

# Tokens of a prefill chunk when the target is run here: as many as a server takes at most by default.
CHUNK_TOKENS = 2048


class SkippedTrajectoryError(WeightError):
    """A trajectory cannot be learned from; `reason` is a word to count it under."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Supervision(NamedTuple):
    """One trajectory of S tokens, ready to be trained on.

    Attributes:
        sequence: Token ids and response mask, on the host.
        taps: [S - 1, len(tap_layer_ids) * H].
        hidden: [S - 1, H] after the target's final norm.
        top1: [S - 1] int64, the target's most likely next token by its raw logits; -1 on prompt rows.
    """

    sequence: TrainingSequence
    taps: Tensor
    hidden: Tensor
    top1: Tensor


class Supervisor:
    """Makes `Supervision` of trajectories of one target; loads the target's layers when a trajectory needs them first.

    Args:
        directory: The target's checkpoint.
        head: Its embedding and LM head, which the layers share once they are loaded.
        backend: Where the target runs, with the ops it serves with.
        tap_layer_ids: Target layers the drafter's context is made of.
        target_digest: Of the target.
        max_tokens: Longer trajectories are skipped.

    Attributes:
        num_recomputed: Trajectories the target was run for.
    """

    def __init__(
        self,
        directory: Path,
        head: TargetHead,
        backend: Backend,
        tap_layer_ids: tuple[int, ...],
        target_digest: str,
        max_tokens: int,
    ) -> None:
        self._directory, self._head, self._backend = directory, head, backend
        self._tap_layer_ids, self._target_digest, self._max_tokens = tap_layer_ids, target_digest, max_tokens
        self._target: TargetModel | None = None
        self._kv: KVCache | None = None
        self.num_recomputed = 0

    @property
    def bytes_per_token(self) -> int:
        """Memory the features of a token take at most: as they arrive, in fp32."""
        return (len(self._tap_layer_ids) + 1) * self._head.config.hidden_size * torch.float32.itemsize

    def check(self, trajectory: Trajectory) -> None:
        """Check what can be checked without features.

        Raises:
            SkippedTrajectoryError: It is of another target, too short or too long, or its ids or features do not fit.
        """
        num_tokens, vocab_size = len(trajectory.token_ids), self._head.config.vocab_size
        num_response = num_tokens - trajectory.num_prompt_tokens
        if trajectory.target_digest != self._target_digest:
            found = trajectory.target_digest
            raise _skipped("other_target", f"target_digest={found} is invalid: must be {self._target_digest}")
        if num_response < 2 or trajectory.num_prompt_tokens < 0:
            raise _skipped("too_short", f"{num_response} response tokens are too few: must be >= 2")
        if num_tokens > self._max_tokens:
            raise _skipped("too_long", f"{num_tokens} tokens are too many: must be <= {self._max_tokens}")
        wrong = next((t for t in trajectory.token_ids if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise _skipped("token_ids", f"token_ids holds {wrong}: must be in [0, {vocab_size})")
        if trajectory.features is not None:
            self._check_shapes(trajectory)

    def _check_shapes(self, trajectory: Trajectory) -> None:
        assert trajectory.features is not None, "there are features to check"
        num_rows, hidden_size = len(trajectory.token_ids) - 1, self._head.config.hidden_size
        expected = [(num_rows, len(self._tap_layer_ids) * hidden_size), (num_rows, hidden_size)]
        found = [array.shape for array in trajectory.features]
        if found != expected:
            raise _skipped("feature_shapes", f"features have the shapes {found}: must be {expected}")

    @torch.no_grad()
    def supervise(self, trajectory: Trajectory) -> Supervision:
        """Return the features of a trajectory that passed `check`, running the target when it brings none.

        Raises:
            SkippedTrajectoryError: A feature is not finite.
        """
        token_ids = torch.tensor(trajectory.token_ids)
        mask = torch.arange(len(token_ids)) >= trajectory.num_prompt_tokens
        taps, hidden = self._captured(trajectory) if trajectory.features is not None else self._recompute(token_ids)
        if not (taps.isfinite().all() and hidden.isfinite().all()):
            raise _skipped("not_finite", "features hold NaN or infinity: must be finite")
        return Supervision(TrainingSequence(token_ids, mask), taps, hidden, self._top1(hidden, mask))

    def _captured(self, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
        assert trajectory.features is not None, "there are features to take"
        device, dtype = self._backend.device, self._head.weight.dtype
        # Copied: what came from a file or a message is read-only memory.
        taps, hidden = (torch.tensor(array).to(device, dtype) for array in trajectory.features)
        return taps, hidden

    def _top1(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return labels where some block of the response can have one: rows from the first response token on."""
        top1 = torch.full((len(hidden),), -1, device=hidden.device)
        first = int(mask.int().argmax())
        top1[first:] = top1_token_ids(hidden[first:], self._head.weight)
        return top1

    # ---- running the target ----------------------------------------------------------------------------------

    def _recompute(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Run the target over all tokens but the last, in chunks through the paged cache, as serving does."""
        target, num_rows = self._loaded(), len(token_ids) - 1
        kv = self._cache_for(num_rows)
        table = list(range(-(-num_rows // kv.block_size)))
        ids = token_ids.tolist()
        taps, hidden = [], []
        for start in range(0, num_rows, CHUNK_TOKENS):
            entry = PackEntry(ids[start : min(start + CHUNK_TOKENS, num_rows)], start, table, 0)
            batch = pack([entry], kv.block_size, self._backend.device)
            meta = self._backend.attention_metadata(batch)
            out = target.forward(batch.token_ids, batch.positions, batch.slot_mapping, meta, kv, self._tap_layer_ids)
            assert out.taps is not None, "taps were asked for"
            taps.append(out.taps)
            hidden.append(out.hidden)
        self.num_recomputed += 1
        return torch.cat(taps), torch.cat(hidden)

    def _loaded(self) -> TargetModel:
        if self._target is None:
            logger.info("loading the target, a trajectory came without features directory=%s", self._directory)
            target = load_target(self._directory, self._backend, self._head.weight.dtype)
            assert isinstance(target, nn.Module), "targets are modules"
            # One copy of the largest two tensors is enough.
            for name, tensor in ((EMBEDDING, self._head.embedding), (LM_HEAD, self._head.weight)):
                target.get_parameter(name).data = tensor
            self._target = target
        return self._target

    def _cache_for(self, num_tokens: int) -> KVCache:
        size = self._backend.preferred_block_size
        num_blocks = -(-num_tokens // size)
        if self._kv is None or len(self._kv.k[0]) < num_blocks:
            config = self._head.config
            self._kv = None  # Free the smaller one first.
            self._kv = KVCache.allocate(
                self._backend,
                config.num_layers,
                num_blocks,
                size,
                config.num_kv_heads,
                config.head_dim,
                self._head.weight.dtype,
            )
        return self._kv


def _skipped(reason: str, message: str) -> SkippedTrajectoryError:
    return SkippedTrajectoryError(reason, message)
