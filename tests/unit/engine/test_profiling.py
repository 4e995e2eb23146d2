# SPDX-License-Identifier: Apache-2.0
"""A profile measures steps of the real runner within its budget, and leaves the engine as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adaflash.cache.block_manager import BlockManager
from adaflash.config import EngineConfig
from adaflash.engine.loading import LoadedEngine, load_engine
from adaflash.engine.profile_cases import ProfileLimits, make_cases
from adaflash.engine.profiling import profile
from adaflash.engine.runner import Drafts, Round, Runner, Verified
from adaflash.engine.scheduler import ScheduledSequence
from adaflash.errors import CapacityError
from adaflash.speculative.base import DraftBlock, Drafter
from adaflash.speculative.budget import DraftSignals
from tests.engines import TinySetup
from tests.tiny_drafters import TinyDrafterBuilder

LIMITS = ProfileLimits(max_num_seqs=16, max_num_batched_tokens=128, max_model_len=512)
CONFIG = EngineConfig(device="cpu", dtype="float32", num_kv_blocks=100)


@pytest.fixture(scope="module")
def setup(tiny_setup: Callable[[str], TinySetup]) -> TinySetup:
    return tiny_setup("llama")


def load(setup: TinySetup, drafter: str | None = "random", config: EngineConfig = CONFIG) -> LoadedEngine:
    draft = None if drafter is None else str(setup.drafters[drafter])
    return load_engine(replace(config, model=str(setup.target), draft=draft))


def pool(loaded: LoadedEngine) -> BlockManager:
    return BlockManager(loaded.num_kv_blocks, loaded.block_size)


class TimedRunner(Runner):
    """A runner whose forwards take no time but what formulas add to a made-up clock."""

    now: float
    num_verified: list[int]

    def verify_s(self, num_seqs: int, num_tokens: int, num_context: int) -> float:
        return 0.02 + 1e-3 * max(0, num_tokens - 16) + 3e-4 * num_seqs + 1e-5 * num_context

    def draft_s(self, num_seqs: int, num_context: int, num_drafts: int) -> float:
        return 4e-3 + 1e-3 * num_seqs * (num_drafts + 1) + 2e-6 * num_context

    def draft(self, drafting: list[ScheduledSequence], num_drafts: int) -> Drafts:
        self.now += self.draft_s(len(drafting), sum(item.seq.num_computed for item in drafting), num_drafts)
        signals = DraftSignals([[0.5] * num_drafts] * len(drafting), None)
        return Drafts([[5] * num_drafts] * len(drafting), signals, None)

    def verify(self, rounds: list[Round], drafts: Drafts | None) -> list[Verified]:
        num_tokens = sum(1 + len(r.draft_token_ids) for r in rounds)
        self.now += self.verify_s(len(rounds), num_tokens, sum(r.scheduled.seq.num_computed for r in rounds))
        self.num_verified.append(num_tokens)
        return []


@pytest.fixture
def timed(setup: TinySetup, monkeypatch: pytest.MonkeyPatch) -> tuple[TimedRunner, BlockManager]:
    loaded = load(setup, config=replace(CONFIG, num_kv_blocks=300))
    runner = loaded.runner
    runner.__class__ = TimedRunner
    assert isinstance(runner, TimedRunner)
    runner.now, runner.num_verified = 0.0, []
    monkeypatch.setattr("adaflash.engine.profiling.time", SimpleNamespace(perf_counter=lambda: runner.now))
    return runner, pool(loaded)


@pytest.mark.parametrize("num_seqs", [1, 5, 16])
def test_the_terms_of_a_machine_are_found(timed: tuple[TimedRunner, BlockManager], num_seqs: int) -> None:
    runner, blocks = timed
    model = profile(runner, blocks, LIMITS, budget_s=100.0)
    for num_tokens in (num_seqs, 3 * num_seqs, 100):
        for num_context in (0, 600, 4000):
            expected = runner.verify_s(num_seqs, num_tokens, num_context)
            predicted = model.verify_s(num_seqs, np.array([num_tokens]), num_context)[0]
            assert predicted == pytest.approx(expected, rel=0.02)
    for num_drafts in (1, 2, 3):
        predicted = model.draft_s(np.array([num_seqs]), 500, num_drafts)[0]
        assert predicted == pytest.approx(runner.draft_s(num_seqs, 500, num_drafts), rel=0.02)


@pytest.mark.parametrize("budget_s", [0.15, 0.3, 0.6, 1.0])
def test_the_budget_is_kept_and_what_lies_beyond_is_extrapolated(
    timed: tuple[TimedRunner, BlockManager], budget_s: float
) -> None:
    runner, blocks = timed
    model = profile(runner, blocks, LIMITS, budget_s)
    assert runner.now <= 1.02 * budget_s, "what context costs is not known before it is measured"
    assert max(runner.num_verified) < 64 or budget_s > 0.2, "large sizes had to be left out"
    costs = model.verify_s(1, np.array([1, 16, 64, 128]), 32)
    assert (np.diff(costs) >= -1e-9).all()
    assert model.draft_s(np.array([16]), 32, 3)[0] == pytest.approx(runner.draft_s(16, 32, 3), rel=0.05)


def test_a_budget_of_nothing_still_measures_what_gives_the_tables_a_slope(
    timed: tuple[TimedRunner, BlockManager],
) -> None:
    runner, blocks = timed
    profile(runner, blocks, LIMITS, budget_s=1e-6)
    assert runner.num_verified == [1, 1, 4], "a warm-up, one token, a whole block"


def test_the_engine_is_as_it_was(setup: TinySetup) -> None:
    loaded, blocks = load(setup), BlockManager(100, 16)
    runner = loaded.runner
    blocks.release(blocks.allocate(7) or [])
    runner.times.draft, runner.times.verify, times = 1.5, 2.5, runner.times
    before = copy.deepcopy((vars(blocks), runner.sampling._seats, runner.sampling._num_sampled))
    profile(runner, blocks, LIMITS, budget_s=0.5)
    assert (vars(blocks), runner.sampling._seats, runner.sampling._num_sampled) == before
    assert list(blocks._free) == list(before[0]["_free"]), "blocks are handed out in the same order"
    assert runner.times is times
    assert (times.draft, times.verify) == (1.5, 2.5)
    assert runner.sampling._is_plain


def test_what_fails_gives_everything_back(setup: TinySetup, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, blocks = load(setup), BlockManager(100, 16)

    def fail(*_: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(loaded.runner, "verify", fail)
    with pytest.raises(RuntimeError, match="lost"):
        profile(loaded.runner, blocks, LIMITS)
    assert blocks.num_free == 100
    assert not loaded.runner.sampling._seats
    assert loaded.runner.times.draft == 0.0


@pytest.mark.parametrize(
    ("drafter", "config", "limits"),
    [
        ("random", CONFIG, ProfileLimits(1, 1, 512)),
        ("random", CONFIG, ProfileLimits(1, 2, 512)),
        ("random", CONFIG, ProfileLimits(3, 7, 512)),
        ("random", CONFIG, ProfileLimits(64, 2048, 3)),
        ("random", replace(CONFIG, num_kv_blocks=1, max_model_len=16), ProfileLimits(16, 128, 16)),
        ("random", replace(CONFIG, num_kv_blocks=3, max_model_len=48), ProfileLimits(16, 128, 48)),
        ("random", replace(CONFIG, num_kv_blocks=2, block_size=2, max_model_len=4), ProfileLimits(16, 128, 4)),
        ("random", replace(CONFIG, num_kv_blocks=2, block_size=1, max_model_len=2), ProfileLimits(16, 128, 2)),
        ("random", replace(CONFIG, sampling_coupling="rejection"), LIMITS),
        (None, CONFIG, LIMITS),
        (None, CONFIG, ProfileLimits(1, 1, 2)),
    ],
)
def test_engines_of_all_sizes_are_profiled(
    setup: TinySetup, drafter: str | None, config: EngineConfig, limits: ProfileLimits
) -> None:
    loaded = load(setup, drafter, config)
    blocks = pool(loaded)
    model = profile(loaded.runner, blocks, limits, budget_s=0.1)
    assert blocks.num_free == blocks.num_blocks
    costs = model.verify_s(1, np.arange(1, limits.max_num_batched_tokens + 1), 0)
    assert np.isfinite(costs).all()
    assert (costs > 0).all()
    can_draft = drafter is not None and blocks.num_blocks * blocks.block_size >= 4
    assert np.isfinite(model.draft_s(np.arange(1, limits.max_num_seqs + 1), 0, 3)).all() == can_draft


def test_the_good_one_of_two_versions_drafts(setup: TinySetup, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, other = load(setup), load(setup, "zero").runner.drafter
    drafters = loaded.runner.drafters
    assert drafters is not None
    assert other is not None
    other.version = 7
    drafters.acquire()
    drafters.introduce(other)
    used: list[int] = []

    def record(drafter: Drafter) -> Callable[..., DraftBlock]:
        block_states = drafter.block_states

        def proposing(*args: Any) -> DraftBlock:
            used.append(drafter.version)
            return block_states(*args)

        return proposing

    for version in drafters.versions:
        monkeypatch.setattr(drafters[version], "block_states", record(drafters[version]))
    profile(loaded.runner, pool(loaded), LIMITS, budget_s=0.2)
    assert set(used) == {7}
    assert drafters.versions == [0, 7], "nobody's version was released"


def test_a_drafter_with_a_short_limit_is_profiled_within_it(
    setup: TinySetup, tiny_drafter: TinyDrafterBuilder, tmp_path: Path
) -> None:
    for limit, can_draft in ((24, True), (4, True), (3, False)):
        draft = tiny_drafter(tmp_path / str(limit), setup.target, config={"max_position_embeddings": limit})
        loaded = load_engine(replace(CONFIG, model=str(setup.target), draft=str(draft)))
        groups = make_cases(loaded.runner.drafter, pool(loaded), LIMITS)
        cases = [case for group in groups for case in group]
        assert all(case.context_len + 4 <= limit for case in cases if case.num_drafts)
        assert any(case.num_drafts for case in cases) == can_draft
        model = profile(loaded.runner, pool(loaded), LIMITS, budget_s=0.1)
        assert bool(np.isfinite(model.draft_s(np.array([1]), 0, 3)[0])) == can_draft


def test_cases_tell_sequences_and_context_from_tokens(setup: TinySetup) -> None:
    loaded = load(setup)
    cases = [case for group in make_cases(loaded.runner.drafter, pool(loaded), LIMITS) for case in group]
    assert len({case.num_seqs for case in cases if case.num_tokens == 4}) == 2
    assert len({case.context_len for case in cases if case.num_tokens == 1}) == 2
    assert max(case.num_tokens for case in cases) == 64, "16 sequences of 4 tokens are the largest step that decodes"
    assert max(case.num_seqs for case in cases if case.num_drafts) == 16


def test_cases_show_where_costs_rise_in_steps(setup: TinySetup) -> None:
    loaded = load(setup)
    groups = make_cases(loaded.runner.drafter, pool(loaded), LIMITS, row_multiple=4)
    sizes = {case.num_tokens for group in groups[:3] for case in group}
    assert {1, 4, 5, 8, 9, 13, 16, 17} <= sizes


def test_a_pool_without_a_free_block_is_refused(setup: TinySetup) -> None:
    loaded = load(setup)
    blocks = pool(loaded)
    taken = blocks.allocate(blocks.num_free)
    with pytest.raises(CapacityError, match="no KV block is free"):
        profile(loaded.runner, blocks, LIMITS)
    assert taken is not None
    blocks.release(taken[:1])
    profile(loaded.runner, blocks, LIMITS, budget_s=0.05)
    assert blocks.num_free == 1
