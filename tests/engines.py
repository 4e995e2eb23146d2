# SPDX-License-Identifier: Apache-2.0
"""Engines over tiny models, with drafters whose quality a test chooses."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from adaflash.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.engine.loading import load_engine
from adaflash.engine.runner import Drafts, Runner
from adaflash.engine.scheduler import ScheduledSequence
from adaflash.request import RequestOutput, SamplingParams
from adaflash.speculative.budget import DraftSignals

TIE = 1e-4

Continuations = Mapping[tuple[int, ...], list[int]]


@dataclass(frozen=True)
class TinySetup:
    """A tiny target with drafters on disk.

    Attributes:
        model: The transformers model, for reference outputs.
        target: Its directory.
        drafters: Directories by name: `random`, `zero`.
    """

    model: PreTrainedModel
    target: Path
    drafters: dict[str, Path]


class OracleRunner(Runner):
    """A runner whose drafts are the target's own continuation, each right with a given probability.

    Everything else is real: the drafter's forward runs, its KV is written, lookahead slots are used.
    """

    continuations: Continuations
    accuracy: float
    accuracy_of: dict[int, float]  # of drafter versions that differ
    rng: random.Random

    def draft(self, drafting: list[ScheduledSequence], num_drafts: int) -> Drafts:
        drafts = super().draft(drafting, num_drafts)
        confidence, token_ids = [], []
        for row, item in zip(drafts.token_ids, drafting, strict=True):
            # A prompt that is not known is one that costs are measured with.
            output = self.continuations.get(tuple(item.seq.request.prompt_token_ids), [])
            known = output[item.seq.num_output_tokens : item.seq.num_output_tokens + len(row)]
            accuracy = self.accuracy_of.get(item.seq.drafter_version, self.accuracy)
            right = [self.rng.random() < accuracy for _ in row]
            padded = known + row[len(known) :]
            token_ids.append([k if ok else r for k, r, ok in zip(padded, row, right, strict=True)])
            confidence.append([0.95 if ok else self.rng.random() for ok in right])
        return Drafts(token_ids, DraftSignals(confidence, drafts.signals.length_ratio), drafts.logits)


def tiny_engine(setup: TinySetup, drafter: str | None, config: EngineConfig | None = None) -> Engine:
    """An engine over `setup`; `drafter` names one of its drafters, None for none."""
    base = config or EngineConfig()
    draft = None if drafter is None else str(setup.drafters[drafter])
    return Engine(replace(base, model=str(setup.target), draft=draft, device="cpu", dtype="float32"))


def oracle_engine(
    setup: TinySetup,
    continuations: Continuations,
    accuracy: float,
    config: EngineConfig,
    accuracy_of: dict[int, float] | None = None,
) -> Engine:
    """An engine whose drafts are right with probability `accuracy`, those of some versions with another."""
    config = replace(
        config, model=str(setup.target), draft=str(setup.drafters["random"]), device="cpu", dtype="float32"
    )
    loaded = load_engine(config)
    runner = loaded.runner
    runner.__class__ = OracleRunner
    assert isinstance(runner, OracleRunner)
    runner.continuations, runner.accuracy, runner.rng = continuations, accuracy, random.Random(0)
    runner.accuracy_of = accuracy_of or {}
    return Engine(config, loaded=loaded)


def random_prompts(num_prompts: int, vocab_size: int, max_len: int, seed: int = 0) -> list[list[int]]:
    """Distinct random prompts of 1..max_len tokens."""
    rng = random.Random(seed)
    prompts: dict[tuple[int, ...], None] = {}
    while len(prompts) < num_prompts:
        prompts[tuple(rng.randrange(3, vocab_size - 1) for _ in range(rng.randint(1, max_len)))] = None
    return [list(prompt) for prompt in prompts]


def transformers_greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens of `model.generate`, stop token included."""
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, use_cache=True
    )
    return output[0, len(prompt) :].tolist()


def unexcused_difference(model: PreTrainedModel, prompt: list[int], expected: list[int], got: list[int]) -> str | None:
    """Describe the first difference of two greedy outputs unless an fp64 forward calls it a tie."""
    if expected == got:
        return None
    k = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    if k >= min(len(expected), len(got)):
        return f"lengths differ: {len(expected)} expected, {len(got)} got"
    logits = model.double()(torch.tensor([prompt + expected[:k]])).logits[0, -1]
    model.float()
    gap = abs(float(logits[expected[k]] - logits[got[k]]))
    best = float(logits.max() - logits[expected[k]])
    return None if gap < TIE and best < TIE else f"token {k}: {expected[k]} expected, {got[k]} got, gap {gap:.2e}"


def run_all(
    engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[RequestOutput]:
    """Generate for all prompts and check that nothing is left behind."""
    outputs = engine.generate(prompts, params)
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_total_blocks, "a KV block leaked"
    return outputs


def step_until_done(engine: Engine, on_step: Callable[[int], None]) -> list[RequestOutput]:
    """Step until idle, calling `on_step` with the step number before each; returns all deltas."""
    deltas, number = [], 0
    while engine.has_unfinished():
        on_step(number)
        deltas += engine.step()
        number += 1
        assert number < 10_000, "the engine does not finish"
    return deltas
