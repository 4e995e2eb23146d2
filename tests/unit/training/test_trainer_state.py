# SPDX-License-Identifier: Apache-2.0
"""Saved states: whole or not there, with a spare for damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from adaflash.errors import ConfigError
from adaflash.training.replay_window import WindowBudget
from adaflash.training.trainer_state import StateDirectory, TrainerState


@pytest.fixture
def states(tmp_path: Path) -> Iterator[StateDirectory]:
    directory = StateDirectory(tmp_path / "state")
    yield directory
    directory.close()


def state(num_steps: int) -> TrainerState:
    return TrainerState(
        "target", "layout", "lineage", num_steps, 3, 2, (4, 5), WindowBudget(1.5, 7, True), skipped_batches=2
    )


def save(states: StateDirectory, num_steps: int) -> None:
    tensors = {"a": torch.full((2, 3), float(num_steps)), "step": torch.tensor(float(num_steps))}
    states.save(state(num_steps), torch.Generator().manual_seed(num_steps), tensors)


def folders(states: StateDirectory) -> list[Path]:
    return sorted(states.root.glob("state-*"))


def test_what_is_saved_is_read_back(states: StateDirectory) -> None:
    assert states.load() is None
    save(states, 9)
    saved = states.load()
    assert saved is not None
    assert saved.state == state(9)
    assert torch.equal(saved.rng, torch.Generator().manual_seed(9).get_state())
    assert saved.tensors.keys() == {"a", "step"}
    assert torch.equal(saved.tensors["a"], torch.full((2, 3), 9.0))
    assert states.num_damaged == 0


def test_the_newest_counts_and_one_spare_is_kept(states: StateDirectory) -> None:
    for num_steps in (1, 2, 3):
        save(states, num_steps)
    saved = states.load()
    assert saved is not None
    assert saved.state.num_steps == 3
    assert len(folders(states)) == 2


def truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def another_format(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"format", b"fromat"))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, damage) for name in ("state.json", "tensors.safetensors") for damage in (truncate, flip, Path.unlink)),
        ("state.json", another_format),
    ],
)
def test_a_damaged_state_gives_way_to_the_one_before(
    states: StateDirectory, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    save(states, 1)
    save(states, 2)
    damage(folders(states)[-1] / name)
    saved = states.load()
    assert saved is not None
    assert saved.state.num_steps == 1
    assert states.num_damaged == 1
    assert "is damaged" in caplog.text
    save(states, 5)
    saved = states.load()
    assert saved is not None
    assert saved.state.num_steps == 5


def test_without_a_whole_state_there_is_none(states: StateDirectory) -> None:
    save(states, 1)
    truncate(folders(states)[0] / "state.json")
    assert states.load() is None
    assert states.num_damaged == 1


def test_half_a_save_is_removed_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "state" / ".staging-4").mkdir(parents=True)
    (tmp_path / "state" / ".staging-4" / "tensors.safetensors").write_bytes(b"half")
    states = StateDirectory(tmp_path / "state")
    assert states.load() is None
    assert not (tmp_path / "state" / ".staging-4").exists()
    states.close()


def test_one_trainer_at_a_time(states: StateDirectory) -> None:
    with pytest.raises(ConfigError, match="in use by another process"):
        StateDirectory(states.root)


def test_a_state_holds_plain_json_and_safetensors(states: StateDirectory) -> None:
    save(states, 1)
    assert sorted(path.name for path in folders(states)[0].iterdir()) == ["state.json", "tensors.safetensors"]
    assert json.loads(json.loads((folders(states)[0] / "state.json").read_text())["state"])["num_steps"] == 1
