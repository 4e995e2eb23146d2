# SPDX-License-Identifier: Apache-2.0
"""Step costs are measured once for a machine and its models; a bad file is measured anew, a bad folder is a warning."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from adaflash.cache.block_manager import BlockManager
from adaflash.config import EngineConfig
from adaflash.engine import cost_cache
from adaflash.engine.cost_cache import CostCache, cost_identity, load_or_profile
from adaflash.engine.loading import load_engine
from adaflash.engine.profile_cases import ProfileLimits
from adaflash.engine.runner import Runner
from adaflash.request import SamplingParams
from adaflash.speculative.cost_model import CostModel
from adaflash.speculative.cost_table import CostSample
from tests.engines import TinySetup, tiny_engine
from tests.tiny_drafters import TinyDrafterBuilder

LIMITS = ProfileLimits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=512)
CONFIG = EngineConfig(device="cpu", dtype="float32", num_kv_blocks=40)


@pytest.fixture(scope="module")
def setup(tiny_setup: Callable[[str], TinySetup]) -> TinySetup:
    return tiny_setup("llama")


@pytest.fixture(scope="module")
def runner(setup: TinySetup) -> Runner:
    return load_engine(replace(CONFIG, model=str(setup.target), draft=str(setup.drafters["random"]))).runner


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> list[CostModel]:
    """Replaces measuring by models that differ; the list holds those that were made."""
    made: list[CostModel] = []

    def profile(*_: object) -> CostModel:
        samples = [CostSample(1, 1, 0, 1.0 + len(made)), CostSample(8, 2, 0, 3.0)]
        made.append(CostModel.from_samples(samples, samples, 32, 4))
        return made[-1]

    monkeypatch.setattr(cost_cache, "profile", profile)
    return made


def first_cost(model: CostModel) -> float:
    return float(model.verify_s(1, np.array([1]), 0)[0])


def load(runner: Runner, folder: Path | None) -> CostModel:
    return load_or_profile(runner, BlockManager(40, 16), LIMITS, 1.0, folder)[0]


def learn(model: CostModel) -> None:
    for _ in range(100):
        model.observe_draft(1, 0, 1.0)
        model.observe_verify(2, 8, 0, 6.0)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_costs_are_measured_once(runner: Runner, profiles: list[CostModel], tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    costs = [first_cost(load(runner, folder)) for _ in range(3)]
    assert costs == pytest.approx([1.0] * 3, rel=1e-3)
    assert len(profiles) == 1
    assert len(files(folder)) == 1, "no temporary file is left"


def test_costs_are_really_measured_and_come_back(runner: Runner, tmp_path: Path) -> None:
    measured, sizes = load(runner, tmp_path), np.arange(1, 64)
    again = load(runner, tmp_path)
    assert again is not measured
    assert again.verify_s(3, sizes, 50) == pytest.approx(measured.verify_s(3, sizes, 50))
    assert again.draft_s(sizes, 50, 3) == pytest.approx(measured.draft_s(sizes, 50, 3))


def test_the_cache_folder_is_where_files_go_by_default(
    runner: Runner, profiles: list[CostModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADAFLASH_CACHE_DIR", str(tmp_path))
    load(runner, None)
    assert files(tmp_path) == ["step-costs"]
    assert len(files(tmp_path / "step-costs")) == len(profiles) == 1


def test_what_was_learned_can_be_kept(runner: Runner, profiles: list[CostModel], tmp_path: Path) -> None:
    model, cache = load_or_profile(runner, BlockManager(40, 16), LIMITS, 1.0, tmp_path)
    learn(model)
    cache.save(model)
    learned = load(runner, tmp_path)
    assert len(profiles) == 1
    sizes = np.arange(1, 33)
    assert learned.verify_s(1, sizes, 0) * model.load == pytest.approx(model.verify_s(1, sizes, 0))
    assert first_cost(learned) != pytest.approx(1.0, rel=0.05)


def test_only_what_is_new_is_written(runner: Runner, profiles: list[CostModel], tmp_path: Path) -> None:
    load(runner, tmp_path)
    model, cache = load_or_profile(runner, BlockManager(40, 16), LIMITS, 1.0, tmp_path)
    cache.path.unlink()
    model.observe_verify(2, 8, 0, 6.0)
    cache.save(model)
    assert files(tmp_path) == [], "one step teaches nothing"
    learn(model)
    cache.save(model)
    assert files(tmp_path) == [cache.path.name]
    cache.path.unlink()
    cache.save(model)
    assert files(tmp_path) == [], "it was written before"


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _change(key: str, value: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return change


def _make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text('{"identity": NaN}'),
        _change("identity", {"device": "another"}),
        _change("costs", None),
        _change("costs", {"verify": {}, "draft": None}),
        _make_directory,
    ],
)
def test_a_damaged_or_foreign_file_is_logged_and_measured_anew(
    runner: Runner,
    profiles: list[CostModel],
    tmp_path: Path,
    damage: Callable[[Path], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    load(runner, tmp_path)
    damage(tmp_path / files(tmp_path)[0])
    with caplog.at_level(logging.WARNING):
        assert first_cost(load(runner, tmp_path)) == pytest.approx(2.0, rel=1e-3)
    assert "cannot be used" in caplog.text
    assert len(profiles) == 2
    if damage is not _make_directory:
        assert first_cost(load(runner, tmp_path)) == pytest.approx(2.0, rel=1e-3)
        assert len(profiles) == 2, "the new file is good"


def test_a_folder_that_cannot_be_written_is_a_warning(
    runner: Runner, profiles: list[CostModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        load(runner, tmp_path / "file" / "folder")
    assert "cannot be kept" in caplog.text
    assert len(profiles) == 1


def test_learned_costs_survive_a_restart(
    setup: TinySetup, profiles: list[CostModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADAFLASH_CACHE_DIR", str(tmp_path))
    config = replace(CONFIG, max_num_seqs=4, max_num_batched_tokens=32)
    engine = tiny_engine(setup, "random", config)
    engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4))
    learn(profiles[0])
    learned = first_cost(profiles[0]) / profiles[0].load
    assert learned != pytest.approx(1.0, rel=0.05)
    engine.close()
    costs = tiny_engine(setup, "random", config)._speculation._costs
    assert len(profiles) == 1
    assert costs is not None
    assert first_cost(costs) == pytest.approx(learned)


def test_a_cache_folder_that_cannot_be_written_does_not_fail_the_close(
    setup: TinySetup,
    profiles: list[CostModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ADAFLASH_CACHE_DIR", str(tmp_path))
    engine = tiny_engine(setup, "random", replace(CONFIG, max_num_seqs=4, max_num_batched_tokens=32))
    before = [path.read_bytes() for path in (tmp_path / "step-costs").iterdir()]

    def refuse(path: Path, *_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    learn(profiles[0])
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr("adaflash.durable_files.Path.open", refuse)
        engine.close()
    assert "cannot be kept" in caplog.text
    assert [path.read_bytes() for path in (tmp_path / "step-costs").iterdir()] == before


def test_an_engine_without_costs_closes(
    setup: TinySetup, profiles: list[CostModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADAFLASH_CACHE_DIR", str(tmp_path))
    tiny_engine(setup, "random", replace(CONFIG, verify_policy="fixed")).close()
    assert not files(tmp_path)
    assert not profiles


def test_everything_that_changes_costs_changes_the_file(
    setup: TinySetup, runner: Runner, tiny_drafter: TinyDrafterBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wider = tiny_drafter(tmp_path / "wider", setup.target, config={"block_size": 6})
    bare = load_engine(replace(CONFIG, model=str(setup.target))).runner
    other = load_engine(replace(CONFIG, model=str(setup.target), draft=str(wider))).runner
    half = load_engine(replace(CONFIG, model=str(setup.target), dtype="bfloat16")).runner
    identities = [
        cost_identity(runner, 16, LIMITS),
        cost_identity(runner, 32, LIMITS),
        cost_identity(runner, 16, replace(LIMITS, max_num_seqs=5)),
        cost_identity(bare, 16, LIMITS),
        cost_identity(other, 16, LIMITS),
        cost_identity(half, 16, LIMITS),
    ]
    monkeypatch.setattr(runner.backend, "row_multiple", 8)
    identities.append(cost_identity(runner, 16, LIMITS))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    identities.append(cost_identity(runner, 16, LIMITS))
    monkeypatch.setattr(cost_cache, "__version__", "99")
    identities.append(cost_identity(runner, 16, LIMITS))
    assert len({CostCache(identity, tmp_path).path for identity in identities}) == len(identities)


def test_weights_do_not_change_the_file(setup: TinySetup, runner: Runner) -> None:
    zero = load_engine(replace(CONFIG, model=str(setup.target), draft=str(setup.drafters["zero"]))).runner
    assert cost_identity(zero, 16, LIMITS) == cost_identity(runner, 16, LIMITS)
