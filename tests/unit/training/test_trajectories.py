# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adaflash.errors import ConfigError
from adaflash.training.spool_segment import Segment
from adaflash.training.trajectories import START, Position, RoundCounts, Trajectory, TrajectoryFeatures, TrajectorySpool

RECORD_TOKENS = 40


def trajectory(index: int, with_features: bool = False) -> Trajectory:
    rng = np.random.default_rng(index)
    tokens = rng.integers(0, 50_000, RECORD_TOKENS).tolist()
    taps, hidden = rng.standard_normal((39, 6), np.float32), rng.standard_normal((39, 2), np.float32)
    features = TrajectoryFeatures(taps, hidden) if with_features else None
    return Trajectory(f"r{index}", index % 3, tokens, 11, [RoundCounts(7, 2)], 4, "abc", 0.5, features)


def open_spool(directory: Path, max_bytes: int = 1 << 20, segment_bytes: int = 2000, **options) -> TrajectorySpool:
    return TrajectorySpool(directory, max_bytes, options.pop("max_age_s", 1e9), segment_bytes, **options)


def ids(spool: TrajectorySpool, after: Position = START) -> list[str]:
    return [record.trajectory.request_id for record in spool.read(after, 10**6)]


def fill(spool: TrajectorySpool, *indices: int) -> None:
    for index in indices:
        assert spool.put(trajectory(index))
    spool.flush()


def test_a_trajectory_comes_back_as_it_was():
    for with_features in (False, True):
        written = trajectory(1, with_features)
        read = Trajectory.from_bytes(b"".join(written.to_buffers()))
        assert replace(read, features=None) == replace(written, features=None)
        if with_features:
            assert all(map(np.array_equal, read.features, written.features))


def test_every_trajectory_has_its_own_record_id():
    assert len({trajectory(1).record_id for _ in range(1000)}) == 1000
    assert {len(trajectory(1).record_id)} == {32}


def test_a_record_of_before_there_were_record_ids_gets_the_same_one_at_each_read(tmp_path, monkeypatch):
    spool = open_spool(tmp_path)
    write = Trajectory.to_buffers
    with monkeypatch.context() as patch:
        patch.setattr(Trajectory, "to_buffers", lambda self: [re.sub(rb', "record_id": "\w*"', b"", write(self)[0])])
        fill(spool, 1, 2)
    first, second = list(spool.record_ids())
    assert list(spool.record_ids()) == [first, second]
    assert len({first, second}) == 2
    assert ids(spool) == ["r1", "r2"]
    spool.close()


def test_a_trajectory_taken_is_on_disk_when_take_returns(tmp_path):
    spool = open_spool(tmp_path)
    taken = [trajectory(index) for index in range(20)]
    for number, one in enumerate(taken, 1):
        assert spool.take(one)
        assert len(open_spool(tmp_path).read(START, 100)) == number
    assert list(spool.record_ids()) == [one.record_id for one in taken]
    spool.close()


@pytest.mark.parametrize("payload", [b"", b"{}\n", b"[]\n", b"no json\n", b'{"shapes": [[9, 9]], "rounds": []}\n'])
def test_what_is_no_trajectory_is_refused(payload):
    with pytest.raises(ValueError, match=r"traject|JSON|Expecting|buffer"):
        Trajectory.from_bytes(payload)


def test_records_are_read_in_order_and_once_acknowledged_deleted(tmp_path):
    spool = open_spool(tmp_path)
    fill(spool, *range(20))
    assert len(list(tmp_path.iterdir())) > 3
    first = spool.read(START, 7)
    assert [record.trajectory.request_id for record in first] == [f"r{i}" for i in range(7)]
    assert ids(spool, first[-1].end) == [f"r{i}" for i in range(7, 20)]
    size = spool.num_bytes
    spool.acknowledge(first[-1].end)
    assert spool.num_bytes < size
    assert ids(spool, first[-1].end) == [f"r{i}" for i in range(7, 20)]
    spool.close()


def test_the_oldest_go_when_the_bytes_are_used_up_and_are_counted(tmp_path):
    spool = open_spool(tmp_path, max_bytes=6000)
    fill(spool, *range(100))
    kept = ids(spool)
    assert spool.num_bytes <= 6000
    assert kept == [f"r{i}" for i in range(100 - len(kept), 100)]
    assert spool.counters.dropped_bytes == 100 - len(kept)
    assert spool.num_records == len(kept)
    spool.close()


def test_old_segments_go_and_a_clock_that_jumps_back_drops_nothing(tmp_path):
    now = [1e9]
    spool = open_spool(tmp_path, max_age_s=60, clock=lambda: now[0])
    fill(spool, *range(10))
    now[0] -= 1e6
    fill(spool, 10)
    assert len(ids(spool)) == 11
    now[0] += 1e6 + 61
    fill(spool, 11)
    assert ids(spool)[-1] == "r11"
    assert spool.counters.dropped_age == 12 - len(ids(spool)) > 0
    spool.close()


def test_what_was_acknowledged_is_not_lost_when_its_segment_goes(tmp_path):
    now = [1e9]
    spool = open_spool(tmp_path, segment_bytes=200_000, max_bytes=400_000, max_age_s=60, clock=lambda: now[0])
    fill(spool, *range(10))
    spool.acknowledge(spool.read(START, 7)[-1].end)
    now[0] += 61
    fill(spool, 10)
    assert spool.counters.dropped_age == 3
    assert ids(spool) == ["r10"]
    spool.acknowledge(spool.end)
    now[0] += 61
    fill(spool, 11)
    assert spool.counters.dropped_age == 3
    spool.close()


def test_a_restart_continues_where_it_was(tmp_path):
    spool = open_spool(tmp_path)
    fill(spool, *range(10))
    position = spool.read(START, 4)[-1].end
    spool.close()
    spool = open_spool(tmp_path)
    fill(spool, 10)
    assert ids(spool, position) == [f"r{i}" for i in range(4, 11)]
    spool.close()


def test_a_damaged_end_costs_the_records_behind_it_alone(tmp_path):
    rng = random.Random(0)
    for case in range(60):
        directory = tmp_path / str(case)
        spool = open_spool(directory)
        fill(spool, *range(12))
        spool.close()
        path = rng.choice(sorted(directory.iterdir()))
        data = bytearray(path.read_bytes())
        place = rng.randrange(len(data))
        if case % 2:
            del data[place:]
        else:
            data[place] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        spool = open_spool(directory)
        fill(spool, 12)
        kept = ids(spool)
        assert kept == sorted(set(kept), key=lambda name: int(name[1:]))
        assert kept[-1] == "r12"
        assert 8 <= len(kept) <= 13
        assert spool.counters.num_corrupt == (0 if len(kept) == 13 else spool.counters.num_corrupt)
        spool.close()


def test_a_read_is_bounded_in_bytes_and_makes_progress_all_the_same(tmp_path):
    spool = open_spool(tmp_path)
    fill(spool, *range(12))
    size = spool.num_bytes // 12
    assert len(spool.read(START, 100, 3 * size + size // 2)) == 3
    position, read = START, []
    while records := spool.read(position, 100, max_bytes=1):
        assert len(records) == 1
        read.append(records[0].trajectory.request_id)
        position = records[0].end
    assert read == [f"r{index}" for index in range(12)]
    spool.close()


def test_a_write_that_breaks_off_anywhere_leaves_what_was_there_and_is_overwritten(tmp_path, monkeypatch):
    """Each part of a record may be cut at any byte, by a full disk or a kill."""
    sizes = [len(buffer) for buffer in trajectory(1, with_features=True).to_buffers()]
    for case, num_written in enumerate([0, 1, 12, 13, sizes[0], sizes[0] + 12, sum(sizes[:2]) + 12, sum(sizes) + 11]):
        directory = tmp_path / str(case)
        spool = open_spool(directory, segment_bytes=20_000)
        fill(spool, 0)
        segment = spool._segments[-1]
        before = segment.num_bytes
        with segment.path.open("r+b") as file:  # what a kill leaves
            file.seek(before)
            scratch = open_spool(tmp_path / f"{case}-scratch", segment_bytes=20_000)
            assert scratch.take(trajectory(1, with_features=True))
            file.write(scratch._segments[0].path.read_bytes()[:num_written])
            scratch.close()
        reopened = open_spool(directory, segment_bytes=20_000)
        assert ids(reopened) == ["r0"]
        assert reopened.counters.num_corrupt == (num_written > 0)
        reopened.close()
        fill(spool, 2)  # the one that was not killed goes on where it was
        assert ids(spool) == ["r0", "r2"]
        assert segment.path == spool._segments[-1].path
        spool.close()


def test_large_arrays_are_written_without_being_copied():
    written = trajectory(1, with_features=True)
    line, taps, hidden = written.to_buffers()
    assert line.endswith(b"}\n")
    assert np.shares_memory(np.frombuffer(taps, np.uint8), written.features.taps)
    assert np.shares_memory(np.frombuffer(hidden, np.uint8), written.features.hidden)


def test_arrays_of_any_layout_and_size_come_back(tmp_path):
    rng = np.random.default_rng(0)
    taps = rng.standard_normal((6, 39), np.float32).T
    spool = open_spool(tmp_path)
    for index, features in enumerate(
        [
            TrajectoryFeatures(taps, taps[:, ::2]),
            TrajectoryFeatures(np.zeros((0, 6), np.float32), np.zeros((0, 2), np.float32)),
            TrajectoryFeatures(taps.astype(">f4"), taps.astype(np.float64)),
        ]
    ):
        assert spool.take(replace(trajectory(index), features=features))
        read = spool.read(START, 10)[-1].trajectory.features
        assert all(map(np.array_equal, read, features))
        assert read.taps.shape == features.taps.shape
    spool.close()


def test_damage_while_running_is_counted_once(tmp_path):
    spool = open_spool(tmp_path)
    fill(spool, *range(12))
    path = min(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-3])
    first = ids(spool)
    assert len(first) == 11
    assert ids(spool) == first
    assert spool.counters.num_corrupt == 1
    spool.close()


def test_a_record_that_is_whole_but_no_trajectory_is_passed_over(tmp_path, monkeypatch, caplog):
    spool = open_spool(tmp_path)
    fill(spool, 0)
    with monkeypatch.context() as patch:  # as another release may have written it
        patch.setattr(Trajectory, "to_buffers", lambda self: [b'{"shapes": [], "rounds": [], "unknown": 1}\n'])
        fill(spool, 1)
    fill(spool, 2)
    assert ids(spool) == ["r0", "r2"]
    assert spool.counters.num_unreadable == 1
    assert "unknown" in caplog.text
    spool.close()


def test_a_full_disk_loses_trajectories_and_nothing_else(tmp_path, monkeypatch, caplog):
    spool = open_spool(tmp_path)
    fill(spool, 0)
    write = Segment.append

    def full(segment, payload):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Segment, "append", full)
    fill(spool, 1, 2)
    assert not spool.take(trajectory(2))
    assert spool.counters.dropped_disk == 3
    assert caplog.text.count("trajectories are lost") == 1
    assert len(list(tmp_path.iterdir())) <= 2, "a disk that stays full does not fill up with empty segments"
    monkeypatch.setattr(Segment, "append", write)
    fill(spool, 3)
    assert ids(spool) == ["r0", "r3"]
    spool.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_device_that_takes_no_bytes_is_a_full_disk(tmp_path):
    spool = open_spool(tmp_path)
    fill(spool, 0)
    path = min(tmp_path.iterdir())
    path.unlink()
    path.symlink_to("/dev/full")
    fill(spool, 1)
    assert spool.counters.dropped_disk == 1
    fill(spool, 2)
    assert ids(spool)[-1] == "r2"
    spool.close()


def test_a_directory_that_vanishes_is_made_again(tmp_path):
    spool = open_spool(tmp_path / "spool")
    fill(spool, 0)
    for path in (tmp_path / "spool").iterdir():
        path.unlink()
    (tmp_path / "spool").rmdir()
    fill(spool, 1, 2)
    assert ids(spool) == ["r2"]
    spool.close()


def test_put_never_waits(tmp_path, monkeypatch):
    spool = open_spool(tmp_path)
    with spool._lock:  # the writer is stuck
        accepted = [spool.put(trajectory(i)) for i in range(300)]
    assert accepted.count(False) == spool.counters.dropped_full > 0
    spool.close()
    assert spool.counters.num_written == accepted.count(True)


@pytest.mark.parametrize(("directory", "max_bytes"), [("file", 1 << 20), ("ok", 100)])
def test_settings_that_cannot_work_are_refused(tmp_path, directory, max_bytes):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="trajectory_spool"):
        open_spool(tmp_path / directory, max_bytes=max_bytes)
