# SPDX-License-Identifier: Apache-2.0
"""Acceptance of one draft position under each way to draft and accept, on synthetic pairs of p and q.

q is p's logits plus Gaussian noise; `--spread` is its standard deviation. Coupled acceptance is counted over draws of
`sample` (so it tests the op as well), the others are exact: rejection sum min(p, q), argmax p(argmax q), independent
sum p q. Daliri et al. (arXiv:2408.07978) bound the coupled one from below by (1 - d) / (1 + d), d = 1 - rejection.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from torch import Tensor

from adaflash.ops.metadata import SamplingMetadata
from adaflash.ops.reference_sampling import sample


def _pair(vocab_size: int, spread: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return logits [V] of p and q: a Zipf law of random exponent in random order, disturbed."""
    exponent = 1.0 + 1.5 * torch.rand(1, generator=generator)
    order = torch.randperm(vocab_size, generator=generator) + 1
    target = -exponent * order.log()
    return target, target + spread * torch.randn(vocab_size, generator=generator)


def _rows(num_draws: int, temperature: float, pair: int) -> SamplingMetadata:
    greedy = SamplingMetadata.greedy(num_draws)
    return replace(
        greedy,
        all_greedy=False,
        temperature=torch.full((num_draws,), temperature),
        seed=torch.arange(num_draws) + pair * num_draws,
    )


def measure(
    vocab_size: int, num_pairs: int, num_draws: int, spread: float, temperature: float, draft_top_k: int
) -> list[float]:
    """Return mean acceptance: rejection, bound, coupled, coupled with drafts from q's top, argmax, independent."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(6, dtype=torch.float64)
    for pair in range(num_pairs):
        target, drafter = _pair(vocab_size, spread, generator)
        p, q = ((logits / temperature).softmax(-1) for logits in (target, drafter))
        rows = _rows(num_draws, temperature, pair)
        tokens = sample(target.expand(num_draws, -1), rows)
        drafts = sample(drafter.expand(num_draws, -1), rows)
        top = replace(rows, top_k=torch.full((num_draws,), draft_top_k, dtype=torch.int32))
        top_drafts = sample(drafter.expand(num_draws, -1), top)
        overlap = float(torch.minimum(p, q).sum())
        total += torch.tensor(
            [
                overlap,
                overlap / (2 - overlap),
                float((tokens == drafts).float().mean()),
                float((tokens == top_drafts).float().mean()),
                float(p[q.argmax()]),
                float((p * q).sum()),
            ],
            dtype=torch.float64,
        )
    return [float(value) for value in total / num_pairs]


def main() -> None:
    """Print one Markdown row per temperature and spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--spread", type=float, nargs="+", default=[0.3, 1.0, 2.0])
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0, 0.7, 0.3])
    parser.add_argument("--draft-top-k", type=int, default=1024)
    args = parser.parse_args()
    top = f"coupled, top {args.draft_top_k}"
    print(f"| spread | T | rejection | bound | coupled | {top} | argmax draft | independent |")
    print("|---|---|---|---|---|---|---|---|")
    for spread in args.spread:
        for temperature in args.temperature:
            values = measure(args.vocab_size, args.pairs, args.draws, spread, temperature, args.draft_top_k)
            print(f"| {spread} | {temperature} | " + " | ".join(f"{value:.3f}" for value in values) + " |", flush=True)


if __name__ == "__main__":
    main()
