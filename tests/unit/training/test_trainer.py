# SPDX-License-Identifier: Apache-2.0
"""The trainer: when it trains, what it publishes, what it continues from, and whose weights it goes on with."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adaflash.errors import ConfigError, PayloadError, WeightError
from adaflash.training.drafter_layout import DrafterLayout
from adaflash.training.payload import PayloadChecker
from adaflash.training.trainer import Trainer
from adaflash.training.trainer_metrics import TrainerCollector
from adaflash.training.version_directory import Publication
from tests.tiny_drafters import TinyDrafterBuilder
from tests.training_setups import RunningTrainer, TrainingSetup, open_trainer
from tests.versions import write_like

Opener = Callable[..., RunningTrainer]


@pytest.fixture
def opened(setup: TrainingSetup, tmp_path: Path) -> Iterator[Opener]:
    """Opens trainers over the same directories, one after another; each closes the one before."""
    running: list[RunningTrainer] = []

    def close() -> None:
        while running:
            running.pop().close()

    def open_next(**settings: Any) -> RunningTrainer:
        close()
        running.append(open_trainer(setup, tmp_path, **settings))
        return running[-1]

    yield open_next
    close()


def fill(setup: TrainingSetup, running: RunningTrainer, count: int = 3) -> None:
    for seed in range(count):
        running.spool.put(setup.trajectory(seed=seed))
    running.spool.flush()
    running.trainer.take_new()


def train(running: RunningTrainer, num_steps: int) -> None:
    for _ in range(num_steps):
        report = running.trainer.step()
        assert report is not None
        assert report.is_applied


def masters(running: RunningTrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in running.parts.learner.state().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


# ---- publishing ----------------------------------------------------------------------------------------------


def test_a_version_passes_the_checks_of_a_server(setup: TrainingSetup, opened: Opener) -> None:
    running = opened()
    fill(setup, running)
    train(running, 3)
    version = running.trainer.publish()
    stored = running.store.get(version)
    PayloadChecker(DrafterLayout.of(setup.drafter), running.parts.target_digest).check(
        stored.directory, stored.manifest
    )
    manifest = stored.manifest
    assert (manifest.kind, manifest.base_version, manifest.train_step) == ("FULL", None, 3)
    assert {"loss", "acceptance_length", "agreement_1"} <= manifest.metrics.keys()
    train(running, 1)
    assert running.store.get(running.trainer.publish()).manifest.base_version == version


def test_a_delta_leads_from_the_version_before(setup: TrainingSetup, opened: Opener) -> None:
    running = opened(publish_kind="DELTA", lr=1e-7, length_head_lr=1e-9)
    fill(setup, running)
    train(running, 1)
    assert running.store.get(running.trainer.publish()).manifest.kind == "FULL"
    train(running, 1)
    assert running.store.get(running.trainer.publish()).manifest.kind == "DELTA"


def test_the_same_step_is_published_once(setup: TrainingSetup, opened: Opener) -> None:
    running = opened()
    fill(setup, running)
    train(running, 1)
    assert running.trainer.publish() == running.trainer.publish() == 1


# ---- what it takes -------------------------------------------------------------------------------------------


def test_bad_trajectories_are_counted_and_the_others_trained_on(setup: TrainingSetup, opened: Opener) -> None:
    running = opened()
    running.trainer.add(setup.trajectory(target_digest="another"))
    running.trainer.add(setup.trajectory(num_response=1))
    assert not running.trainer.may_step()
    running.trainer.add(setup.trajectory())
    assert running.trainer.may_step()
    train(running, 1)
    status = running.trainer.status
    assert status.skipped == {"other_target": 1, "too_short": 1}
    assert (status.num_trajectories, status.num_recomputed, status.counters.num_steps) == (1, 1, 1)


def test_a_batch_that_is_not_finite_is_counted_and_spends_its_budget(
    setup: TrainingSetup, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = opened(max_epochs=1.0)
    fill(setup, running)
    monkeypatch.setattr(running.parts.learner.optimizer, "step", lambda loss: None)
    while running.trainer.may_step():
        report = running.trainer.step()
        assert report is not None
        assert not report.is_applied
    assert running.trainer.status.counters.num_skipped_batches > 0
    assert running.trainer.status.train_step == 0


def test_an_idle_window_is_trained_on_only_so_often(setup: TrainingSetup, opened: Opener) -> None:
    running = opened(max_epochs=3.0, trajectories_per_step=2, anchors_per_trajectory=5)
    fill(setup, running, count=4)
    num_anchors = 0
    while running.trainer.may_step():
        report = running.trainer.step()
        assert report is not None
        num_anchors += report.num_anchors
    assert 3 * 4 * 19 <= num_anchors < 3 * 4 * 19 + 10


# ---- restarts ------------------------------------------------------------------------------------------------


def test_a_restart_continues_as_if_there_had_been_none(setup: TrainingSetup, opened: Opener, tmp_path: Path) -> None:
    running = opened()
    fill(setup, running, count=5)
    train(running, 4)
    running.trainer.save()
    train(running, 4)
    expected = masters(running)
    budget = running.trainer._state.budget
    running = opened()
    running.trainer.take_new()
    assert running.trainer.status.train_step == 4
    train(running, 4)
    assert same(masters(running), expected)
    assert running.trainer._state.budget == budget


def test_what_came_after_the_last_save_is_not_lost(setup: TrainingSetup, opened: Opener) -> None:
    running = opened()
    fill(setup, running, count=2)
    running.trainer.save()
    fill(setup, running, count=3)
    budget = running.trainer._state.budget
    running = opened()
    running.trainer.take_new()
    assert running.trainer.status.num_trajectories == 5
    assert running.trainer._state.budget == budget


def test_a_version_published_just_before_a_crash_is_its_own(setup: TrainingSetup, opened: Opener) -> None:
    running = opened()
    fill(setup, running)
    train(running, 2)
    version = running.trainer.publish()
    weights = masters(running)
    running = opened()  # the last save was before the publication
    assert running.trainer.status.base_version == version
    assert running.trainer.status.counters.num_resets == 0
    assert same(masters(running), weights)


def test_what_was_saved_but_not_published_before_a_crash_is_published(
    setup: TrainingSetup, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = opened(max_epochs=1.0)
    fill(setup, running)
    while running.trainer.may_step():
        train(running, 1)
    num_steps = running.trainer.status.train_step

    def crash(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(running.store, "publish", crash)
    with pytest.raises(KeyboardInterrupt):
        running.trainer.publish()  # the state is saved by now
    running = opened(publish_interval_s=0.01, max_epochs=1.0)
    with Background(running.trainer):
        wait_until(lambda: running.store.newest() is not None)
    assert [version.manifest.train_step for version in running.store.versions()] == [num_steps]


def test_a_damaged_state_gives_way_to_the_one_before(setup: TrainingSetup, opened: Opener, tmp_path: Path) -> None:
    running = opened()
    fill(setup, running)
    train(running, 1)
    running.trainer.save()
    train(running, 1)
    running.trainer.save()
    newest = max((tmp_path / "state").glob("state-*"))
    (newest / "state.json").write_text("{}")
    running = opened()
    assert running.trainer.status.train_step == 1
    assert running.trainer.status.counters.num_damaged_states == 1


def test_without_a_state_it_goes_on_from_the_newest_version(
    setup: TrainingSetup, opened: Opener, tmp_path: Path
) -> None:
    running = opened()
    fill(setup, running)
    train(running, 2)
    version = running.trainer.publish()
    trained = {n: t for n, t in masters(running).items() if n.startswith("master/")}
    running.close()
    shutil.rmtree(tmp_path / "state")
    running = opened()
    assert running.trainer.status.base_version == version
    assert same(masters(running), trained)


def test_directories_of_another_drafter_are_refused(
    setup: TrainingSetup, opened: Opener, tmp_path: Path, tiny_drafter: TinyDrafterBuilder
) -> None:
    running = opened()
    fill(setup, running)
    train(running, 1)
    running.trainer.publish()
    running.close()
    other = TrainingSetup(setup.target, tiny_drafter(tmp_path / "other", setup.target))
    with pytest.raises(ConfigError, match=r"trainer state .* is of another training: layout_signature="):
        open_trainer(other, tmp_path)
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(ConfigError, match=r"weight store .* is of another training: layout_signature="):
        open_trainer(other, tmp_path)


def test_a_state_of_other_settings_is_refused(setup: TrainingSetup, opened: Opener) -> None:
    running = opened(freeze_context=True)
    fill(setup, running)
    train(running, 1)
    state = running.parts.learner.state()
    del state["master/fc.weight"]
    running.states.save(running.trainer._state, torch.Generator(), state)
    with pytest.raises(ConfigError, match=r"is of other settings: 'master/fc\.weight'"):
        opened()


# ---- other weights -------------------------------------------------------------------------------------------


def test_a_bad_version_takes_training_back_to_the_last_good_one(
    setup: TrainingSetup, opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    running = opened()
    fill(setup, running)
    train(running, 2)
    good = running.trainer.publish()
    trained = {n: t for n, t in masters(running).items() if n.startswith("master/")}
    train(running, 2)
    bad = running.trainer.publish()
    running.store.mark_bad(bad, "worse")
    running.trainer.follow_store()
    assert running.trainer.status.base_version == good
    assert same(masters(running), trained), "its moments are fresh"
    assert f"version={good} instead_of={bad} reason=bad" in caplog.text
    train(running, 1)
    assert running.trainer.publish() == bad + 1


def test_without_a_good_version_training_goes_back_to_the_start(setup: TrainingSetup, opened: Opener) -> None:
    running = opened()
    fill(setup, running)
    start = masters(running)
    train(running, 2)
    running.store.mark_bad(running.trainer.publish(), "worse")
    running.trainer.follow_store()
    assert running.trainer.status.base_version == 0
    assert same(masters(running), start)


def test_a_bad_mark_on_another_version_changes_nothing(setup: TrainingSetup, opened: Opener) -> None:
    running = opened()
    fill(setup, running)
    train(running, 1)
    first = running.trainer.publish()
    train(running, 1)
    running.trainer.publish()
    weights = masters(running)
    running.store.mark_bad(first, "worse")
    running.trainer.follow_store()
    assert same(masters(running), weights)


def test_a_version_that_somebody_else_published_is_gone_on_from(setup: TrainingSetup, opened: Opener) -> None:
    running = opened()
    fill(setup, running)
    train(running, 1)
    running.trainer.publish()
    publication = Publication(running.parts.target_digest, 1)
    version = running.store.publish(write_like(setup.drafter, seed=3), publication)
    running.trainer.follow_store()
    assert running.trainer.status.base_version == version
    expected = load_file(running.store.get(version).directory / "model.safetensors")["fc.weight"]
    assert torch.equal(masters(running)["master/fc.weight"], expected)


# ---- the loop ------------------------------------------------------------------------------------------------


class Background:
    """Runs a trainer in a thread, as `adaflash trainer` does."""

    def __init__(self, trainer: Trainer) -> None:
        self.stop = threading.Event()
        self.thread = threading.Thread(target=trainer.run, args=(self.stop,))

    def __enter__(self) -> Background:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def test_it_trains_on_what_comes_to_the_spool_and_publishes(
    setup: TrainingSetup, opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    running = opened(publish_interval_s=0.05, max_epochs=2.0)
    with Background(running.trainer):
        running.spool.put(setup.trajectory())
        wait_until(lambda: running.store.newest() is not None)
        running.spool.put(setup.trajectory(seed=1))
        wait_until(lambda: running.trainer.status.num_trajectories == 2)
    assert "published version=1 train_step=" in caplog.text
    saved = running.states.load()
    assert saved is not None
    assert saved.state.num_steps == running.trainer.status.train_step > 0


def test_without_steps_nothing_is_published(setup: TrainingSetup, opened: Opener) -> None:
    running = opened(publish_interval_s=0.01)
    with Background(running.trainer):
        time.sleep(0.3)
    assert running.store.newest() is None


def test_an_idle_trainer_sleeps(setup: TrainingSetup, opened: Opener) -> None:
    running = opened(publish_interval_s=0.01)
    with Background(running.trainer):
        before = time.process_time()
        time.sleep(2.0)
        assert time.process_time() - before < 0.5


@pytest.mark.parametrize("error", [WeightError("no base"), OSError("disk full")])
def test_a_failed_publication_is_tried_again(
    setup: TrainingSetup, opened: Opener, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = opened(publish_interval_s=0.05)
    publish, errors = running.store.publish, [error]

    def fail_once(*args: Any) -> int:
        if errors:
            raise errors.pop()
        return publish(*args)

    monkeypatch.setattr(running.store, "publish", fail_once)
    running.spool.put(setup.trajectory())
    with Background(running.trainer):
        wait_until(lambda: running.store.newest() is not None)
    assert running.trainer.status.counters.num_failed_publications == 1


def test_weights_that_the_store_refuses_are_given_up(
    setup: TrainingSetup, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = opened(publish_interval_s=0.05)
    start = masters(running)

    def refuse(*args: Any) -> int:
        raise PayloadError("fc.weight is not finite")

    monkeypatch.setattr(running.store, "publish", refuse)
    fill(setup, running)
    train(running, 1)
    running.trainer._publish_if_due()
    assert running.trainer.status.counters.num_resets == 1
    assert same(masters(running), start)


def test_metrics_say_what_it_does(setup: TrainingSetup, opened: Opener) -> None:
    running = opened()
    fill(setup, running)
    running.trainer.add(setup.trajectory(num_response=1))
    train(running, 2)
    metrics = TrainerCollector(lambda: running.trainer.status).collect()
    samples = {(s.name, *s.labels.values()): s.value for metric in metrics for s in metric.samples}
    assert samples["adaflash:trainer_steps_total",] == 2
    assert samples["adaflash:trainer_skipped_trajectories_total", "too_short"] == 1
    assert samples["adaflash:trainer_window_tokens",] == 72
    assert samples["adaflash:trainer_figure", "acceptance_length"] >= 1
