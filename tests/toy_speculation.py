# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding of a toy language model through a backend's `sample` and `verify_drafts`, thousands at a time.

The target's next token depends on the last two; the drafter's block on the last token alone, so it is often wrong. The
rounds are the engine's: draft K, choose verify lengths, verify, commit, until every sequence has NUM_TOKENS tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from adaflash.ops.backend import Backend
from adaflash.ops.metadata import SamplingMetadata, VerifyMetadata

VOCAB_SIZE = 8
NUM_TOKENS = 4
NUM_DRAFTS = 3

# q [n, K, Vd], drafts as columns [n, K] -> verify lengths [n]
VerifyRule = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Filters:
    """Sampling parameters all sequences share; defaults filter nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def rows(self, seed: Tensor, output_index: Tensor, column_token_ids: Tensor | None = None) -> SamplingMetadata:
        """Metadata of rows with these seeds and output indexes, [R] int64 each."""

        def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full(seed.shape, value, dtype=dtype, device=seed.device)

        return SamplingMetadata(
            all_greedy=self.temperature == 0,
            temperature=full(self.temperature),
            top_k=full(self.top_k, torch.int32) if self.top_k else None,
            top_p=full(self.top_p) if self.top_p < 1 else None,
            min_p=full(self.min_p) if self.min_p else None,
            seed=seed,
            sample_index=torch.zeros_like(seed),
            output_index=output_index,
            column_token_ids=column_token_ids,
        )

    def probs(self, logits: np.ndarray) -> np.ndarray:
        """The distribution these parameters make of one row of logits, by the definitions, one token at a time."""
        probs = np.exp(logits / self.temperature - np.max(logits / self.temperature))
        if self.top_k:
            probs = np.where(probs >= np.sort(probs)[-min(self.top_k, len(probs))], probs, 0)
        probs = probs / probs.sum()
        if self.top_p < 1:
            kept, mass = np.zeros_like(probs), 0.0
            for token in np.argsort(-probs, kind="stable"):
                if mass >= self.top_p:
                    break
                kept[token], mass = probs[token], mass + probs[token]
            probs = kept
        probs = np.where(probs >= self.min_p * probs.max(), probs, 0)
        result: np.ndarray = probs / probs.sum()
        return result


def confident_prefix(q: Tensor, drafts: Tensor) -> Tensor:
    """Verify up to the first position whose distribution is flat: reads q alone, so it is lossless."""
    return (q.amax(-1) > 0.35).long().cumprod(-1).sum(-1)


def likely_prefix(q: Tensor, drafts: Tensor) -> Tensor:
    """Drop the first draft whose own probability is low, and all after it: biased under `rejection`."""
    return (q.gather(-1, drafts[..., None])[..., 0] > 0.25).long().cumprod(-1).sum(-1)


def everything(q: Tensor, drafts: Tensor) -> Tensor:
    """Verify all drafts."""
    return torch.full(q.shape[:1], NUM_DRAFTS, dtype=torch.int64, device=q.device)


@dataclass
class Generation:
    """Tokens [S, NUM_TOKENS] of every sequence, and what speculation did for them."""

    tokens: Tensor
    num_rounds: int
    num_verified: int
    num_accepted: int


class ToyModel:
    """Random conditional tables of a target and of a drafter over `column_token_ids`."""

    def __init__(self, device: torch.device, column_token_ids: list[int] | None = None) -> None:
        generator = torch.Generator().manual_seed(7)
        size = VOCAB_SIZE + 1  # the last index stands for "before the first token"
        self.device = device
        self.column_token_ids = None if column_token_ids is None else torch.tensor(column_token_ids, device=device)
        target = 1.5 * torch.randn(size, size, VOCAB_SIZE, generator=generator)
        blurred = target.mean(0)[:, None] + 0.7 * torch.randn(size, NUM_DRAFTS, VOCAB_SIZE, generator=generator)
        self.target = target.to(device)
        self.drafter = (blurred if column_token_ids is None else blurred[..., column_token_ids]).to(device)

    def exact_pairs(self, filters: Filters) -> np.ndarray:
        """The joint law of output tokens 1 and 2, [V, V], by enumeration."""
        table = self.target.cpu().double().numpy()
        start = VOCAB_SIZE
        joint = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
        for first, p_first in enumerate(filters.probs(table[start, start])):
            for second, p_second in enumerate(filters.probs(table[start, first])):
                joint[second] += p_first * p_second * filters.probs(table[first, second])
        return joint

    def generate(
        self, backend: Backend, seeds: Tensor, filters: Filters, rejection: bool, verify_rule: VerifyRule
    ) -> Generation:
        """Decode all sequences speculatively."""
        tokens = torch.full((seeds.shape[0], 2 + NUM_TOKENS + NUM_DRAFTS), VOCAB_SIZE, device=self.device)
        lengths = torch.zeros_like(seeds)
        result = Generation(tokens, 0, 0, 0)
        while len(active := (lengths < NUM_TOKENS).nonzero()[:, 0]):
            self._round(backend, active, seeds, tokens, lengths, filters, rejection, verify_rule, result)
        result.tokens = tokens[:, 2 : 2 + NUM_TOKENS]
        return result

    def _round(
        self,
        backend: Backend,
        active: Tensor,
        seeds: Tensor,
        tokens_: Tensor,
        lengths_: Tensor,
        filters: Filters,
        rejection: bool,
        verify_rule: VerifyRule,
        result_: Generation,
    ) -> None:
        steps = torch.arange(NUM_DRAFTS + 1, device=self.device)
        seed, length = seeds[active], lengths_[active]
        index = length[:, None] + steps  # [n, K + 1] output index of each row
        draft_logits = self.drafter[tokens_[active, length + 1]]  # [n, K, Vd]
        draft_rows = filters.rows(seed.repeat_interleave(NUM_DRAFTS), index[:, :-1].flatten(), self.column_token_ids)
        columns = backend.sample(draft_logits.flatten(0, 1), draft_rows).view(-1, NUM_DRAFTS)
        drafts = columns if self.column_token_ids is None else self.column_token_ids[columns]
        q = (draft_logits / filters.temperature).softmax(-1)
        num_verified = verify_rule(q, columns).minimum(NUM_TOKENS - 1 - length)
        inside = steps <= num_verified[:, None]
        context = torch.cat([tokens_[active[:, None], length[:, None] + steps[:2]], drafts], dim=1)
        target_logits = self.target[context[:, :-1], context[:, 1:]][inside]  # [R, V]
        cu_rows = torch.cat([steps[:1], (num_verified + 1).cumsum(0)])
        out = backend.verify_drafts(
            target_logits,
            drafts,
            draft_logits if rejection else None,
            VerifyMetadata(cu_rows, num_verified.tolist()),
            filters.rows(seed.repeat_interleave(num_verified + 1), index[inside]),
            self.column_token_ids,
        )
        emitted = steps[: out.token_ids.shape[1]] <= out.num_accepted[:, None]
        rows, places = emitted.nonzero(as_tuple=True)
        tokens_[active[rows], length[rows] + 2 + places] = out.token_ids[emitted]
        lengths_[active] += out.num_accepted + 1
        result_.num_rounds += len(active)
        result_.num_verified += int(num_verified.sum())
        result_.num_accepted += int(out.num_accepted.sum())


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Chi-square test of counts against probabilities; rare cells are pooled, an impossible outcome gives 0."""
    counts, probs = counts.ravel(), probs.ravel()
    if counts[probs <= 1e-12].any():
        return 0.0
    expected = probs * counts.sum()
    common = expected >= 5
    if (~common & (probs > 1e-12)).any():
        counts = np.append(counts[common], counts[~common].sum())
        expected = np.append(expected[common], expected[~common].sum())
    else:
        counts, expected = counts[common], expected[common]
    return float(stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


def pair_counts(tokens: Tensor) -> np.ndarray:
    """How often each pair of output tokens 1 and 2 occurs, [V, V]."""
    pairs = tokens[:, 1] * VOCAB_SIZE + tokens[:, 2]
    counts: np.ndarray = np.bincount(pairs.cpu().numpy(), minlength=VOCAB_SIZE**2).reshape(VOCAB_SIZE, VOCAB_SIZE)
    return counts
