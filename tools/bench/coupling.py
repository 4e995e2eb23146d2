# SPDX-License-Identifier: Apache-2.0
"""Acceptance of the demo drafter under both sampling couplings, through the whole engine.

Every block is verified whole (`fixed`), so that both couplings draft under the same conditions.

Usage: python tools/bench/coupling.py [--domain code] [--num-prompts N] [--max-tokens N] [--json]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

from adaflash import ChatMessage, Engine, EngineConfig, SamplingParams
from adaflash.config import SamplingCoupling
from adaflash.demo.prompts import demo_prompts

COUPLINGS: tuple[SamplingCoupling, ...] = ("gumbel", "rejection")
TEMPERATURES = (1.0, 0.7, 0.3)


@dataclass(frozen=True)
class Acceptance:
    """What one coupling accepted at one temperature.

    Attributes:
        first_position: Share of blocks whose first draft was accepted.
        acceptance_length: Tokens per decode round, bonus token included.
    """

    coupling: str
    temperature: float
    num_blocks: int
    first_position: float
    acceptance_length: float


def measure(engine: Engine, prompts: list[str], temperature: float, max_tokens: int) -> Acceptance:
    """Generate for all prompts and count."""
    before = engine.stats()
    each = [SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed) for seed in range(len(prompts))]
    replies = engine.generate([[ChatMessage("user", prompt)] for prompt in prompts], each)
    after = engine.stats()
    num_blocks = after.num_drafts - before.num_drafts
    first = after.num_accepted_per_position[0] - before.num_accepted_per_position[0]
    rounds = sum(reply.speculation.num_rounds for reply in replies)
    emitted = sum(reply.speculation.num_emitted_tokens for reply in replies)
    return Acceptance(
        engine.config.sampling_coupling, temperature, num_blocks, first / num_blocks, emitted / max(1, rounds)
    )


def main() -> None:
    """Measure and print every coupling and temperature."""
    parser = argparse.ArgumentParser(description="acceptance of the demo drafter under both couplings")
    parser.add_argument("--domain", default="code")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    prompts = [prompt.prompt for prompt in demo_prompts(args.domain)[: args.num_prompts]]
    results = []
    for coupling in COUPLINGS:
        config = EngineConfig(verify_policy="fixed", sampling_coupling=coupling, enable_prefix_caching=False)
        engine = Engine(config)
        for temperature in TEMPERATURES:
            result = measure(engine, prompts, temperature, args.max_tokens)
            results.append(result)
            if not args.json:
                print(
                    f"{coupling:10s} T={temperature:3.1f} blocks={result.num_blocks:5d} "
                    f"first={result.first_position:.3f} acceptance_length={result.acceptance_length:.3f}",
                    flush=True,
                )
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
