# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from adaflash.errors import ConfigError
from adaflash.training.staging import StagedVersion, StagingArea
from adaflash.training.version_directory import write_manifest
from tests.versions import publication, write_small


def stage(area: StagingArea, version: int) -> StagedVersion:
    incoming = area.incoming(version, "f" * 64)
    write_small(version)(incoming)
    return area.commit(incoming, write_manifest(incoming, version, publication(), None).manifest)


def test_a_staged_version_is_there_after_a_restart(tmp_path: Path) -> None:
    area = StagingArea(tmp_path)
    staged = stage(area, 5)
    assert staged.directory == tmp_path / "v00000005"
    area.note_handed_over(5)
    area.mark_bad(4, "poor")
    area.close()
    area = StagingArea(tmp_path)
    found = area.find(5)
    assert found is not None
    assert found.manifest == staged.manifest
    assert (area.versions(), area.highest, area.is_bad(4), area.is_bad(5)) == ([5], 5, True, False)
    assert area.find(6) is None


def test_the_newest_good_and_the_pinned_are_kept(tmp_path: Path) -> None:
    area = StagingArea(tmp_path, keep=2)
    for version in (1, 2, 3):
        stage(area, version)
    area.pin("last_good", 2)
    area.mark_bad(4, "poor")
    for version in (4, 7, 9):
        stage(area, version)
    assert area.versions() == [2, 7, 9]
    area.discard(7)
    assert area.versions() == [2, 9]


def test_only_the_same_content_is_gone_on_with(tmp_path: Path) -> None:
    area = StagingArea(tmp_path)
    incoming = area.incoming(5, "a" * 64)
    (incoming / "model.safetensors.part").write_bytes(b"half")
    assert (area.incoming(5, "a" * 64) / "model.safetensors.part").read_bytes() == b"half"
    assert list(area.incoming(5, "b" * 64).iterdir()) == []
    assert list(area.incoming(5, "a" * 64).iterdir()) == []
    area.incoming(6, "a" * 64)
    assert len(list(tmp_path.glob(".incoming-*"))) == 1


def test_a_version_fetched_again_takes_the_place_of_the_old(tmp_path: Path) -> None:
    area = StagingArea(tmp_path)
    staged = stage(area, 5)
    (staged.directory / "model.safetensors").write_bytes(b"damaged")
    again = stage(area, 5)
    assert (again.directory / "model.safetensors").stat().st_size == again.manifest.file("model.safetensors").size


def test_two_processes_cannot_share_the_directory(tmp_path: Path) -> None:
    area = StagingArea(tmp_path)
    with pytest.raises(ConfigError, match="in use by another process"):
        StagingArea(tmp_path)
    area.close()
    StagingArea(tmp_path).close()


def test_lost_decisions_never_lead_backwards(tmp_path: Path) -> None:
    area = StagingArea(tmp_path)
    stage(area, 5)
    area.note_handed_over(5)
    area.note_handed_over(3)
    area.close()
    for name in ("state.json", "state.copy.json"):
        (tmp_path / name).write_bytes(b"{")
    assert StagingArea(tmp_path).highest == 5


def test_a_damaged_manifest_is_no_version(tmp_path: Path) -> None:
    area = StagingArea(tmp_path)
    staged = stage(area, 5)
    (staged.directory / "manifest.json").write_bytes(b"{}")
    assert area.find(5) is None
