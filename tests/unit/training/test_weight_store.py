# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from adaflash.errors import BadVersionError, ConfigError, DamagedVersionError, UnknownVersionError, WeightError
from adaflash.training.manifest import Manifest
from adaflash.training.version_directory import directory_name
from adaflash.training.weight_store import WeightStore
from tests.versions import publication, write_small


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def publish(store: WeightStore, seed: int = 0, **fields: object) -> int:
    return store.publish(write_small(seed), publication(**fields))  # type: ignore[arg-type]


def reopened(store: WeightStore, **settings: int) -> WeightStore:
    store.close()
    return WeightStore(store.root, **settings)  # type: ignore[arg-type]


def test_a_version_is_there_with_its_manifest_after_a_restart(root: Path) -> None:
    store = WeightStore(root)
    assert store.newest() is None
    version = publish(store, train_step=7, metrics={"loss": 1.5})
    stored = reopened(store).newest()
    assert stored is not None
    assert (stored.version, version, stored.directory.name) == (1, 1, "v00000001")
    manifest = stored.manifest
    assert (manifest.train_step, manifest.metrics, manifest.kind, manifest.base_version) == (
        7,
        {"loss": 1.5},
        "FULL",
        None,
    )
    assert [(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in manifest.tensors] == [
        ("fc.weight", "F32", (8, 8), 256),
        ("norm.weight", "F32", (3,), 12),
    ]
    assert {path.name for path in stored.directory.iterdir()} == {"model.safetensors", "config.json", "manifest.json"}


def test_numbers_grow_and_retention_keeps_the_newest_and_the_pinned(root: Path) -> None:
    store = WeightStore(root, keep=2)
    assert [publish(store) for _ in range(3)] == [1, 2, 3]
    store.pin("last_good", 2)
    assert [publish(store) for _ in range(3)] == [4, 5, 6]
    assert [stored.version for stored in store.versions()] == [2, 5, 6]
    store = reopened(store, keep=2)
    assert [stored.version for stored in store.versions()] == [2, 5, 6]
    store.unpin("last_good")
    publish(store)
    assert [stored.version for stored in store.versions()] == [6, 7]
    with pytest.raises(UnknownVersionError, match="version 2 is not in the store: must be one of 6, 7"):
        store.get(2)


def test_a_number_is_not_used_again_when_every_version_was_deleted(root: Path) -> None:
    store = WeightStore(root)
    assert [publish(store) for _ in range(3)] == [1, 2, 3]
    store.close()
    for version in (1, 2, 3):
        for path in (root / directory_name(version)).iterdir():
            path.unlink()
        (root / directory_name(version)).rmdir()
    assert publish(WeightStore(root)) == 4


@pytest.mark.parametrize("lost", [["state.json"], ["state.copy.json"], ["state.copy.json", "state.json"]])
@pytest.mark.parametrize("how", ["missing", "damaged", "empty"])
def test_a_lost_state_file_is_named_and_numbers_go_on(root: Path, lost: list[str], how: str) -> None:
    store = WeightStore(root, keep=2)
    for _ in range(4):
        publish(store)
    store.close()
    for name in lost:
        data = (root / name).read_bytes()
        if how == "missing":
            (root / name).unlink()
        else:
            (root / name).write_bytes(b"" if how == "empty" else data.replace(b"next_version", b"next_xersion"))
    store = WeightStore(root, keep=2)
    assert sorted(store.damaged) == lost
    assert publish(store) == 5
    assert reopened(store).damaged == {}


def test_the_same_idempotency_key_publishes_once(root: Path) -> None:
    store = WeightStore(root, keep=1)
    assert publish(store, idempotency_key="step 10") == 1
    assert publish(store, seed=1, idempotency_key="step 10") == 1
    assert publish(store, idempotency_key="step 20") == 2
    store = reopened(store)
    assert [publish(store, idempotency_key=key) for key in ("step 10", "step 20", "step 30")] == [1, 2, 3]


def test_the_key_is_known_even_if_the_state_was_not_saved_after_the_version(root: Path) -> None:
    store = WeightStore(root)
    before = (root / "state.json").read_bytes()
    publish(store, idempotency_key="a")
    store.close()
    for name in ("state.json", "state.copy.json"):
        (root / name).write_bytes(before)
    assert publish(WeightStore(root), idempotency_key="a") == 1


def test_a_bad_mark_lasts_and_the_version_is_not_handed_out(root: Path) -> None:
    store = WeightStore(root)
    publish(store)
    publish(store)
    store.mark_bad(2, "acceptance fell")
    store.mark_bad(2, "another reason")
    store = reopened(store)
    newest = store.newest()
    assert newest is not None
    assert newest.version == 1
    assert store.newest(from_version=2) is None
    assert store.bad == {2: "acceptance fell"}
    for call in (store.get, store.verify, lambda version: store.open_file(version, "config.json")):
        with pytest.raises(BadVersionError, match="version 2 was marked bad: acceptance fell"):
            call(2)
    with pytest.raises(UnknownVersionError, match="version 3 was never published"):
        store.mark_bad(3, "")


def test_a_second_writer_is_refused_until_the_first_closes(root: Path) -> None:
    store = WeightStore(root)
    with pytest.raises(ConfigError, match="another process writes to it"):
        WeightStore(root)
    thread = threading.Thread(target=store.close)
    thread.start()
    thread.join()
    WeightStore(root).close()


def test_a_killed_writer_does_not_hold_the_lock(root: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from adaflash.training.weight_store import WeightStore
store = WeightStore(Path({str(root)!r}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert publish(WeightStore(root)) == 1


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("model.safetensors", _flip, r"model\.safetensors has sha256"),
        ("model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-1]), "must have"),
        ("config.json", Path.unlink, r"config\.json is missing"),
        ("manifest.json", Path.unlink, r"manifest\.json cannot be read"),
        ("manifest.json", lambda path: path.write_bytes(b"\x80\x04."), "cannot be read as JSON"),
        (
            "manifest.json",
            lambda path: path.write_bytes(path.read_bytes().replace(b'"version": 2', b'"version": 9')),
            "must be 2",
        ),
    ],
)
def test_a_damaged_version_is_named_and_the_rest_is_served(root: Path, file: str, damage: object, words: str) -> None:
    store = WeightStore(root)
    for seed in range(3):
        publish(store, seed, idempotency_key=f"{seed}")
    store.close()
    damage(root / "v00000002" / file)  # type: ignore[operator]
    store = WeightStore(root)
    assert list(store.damaged) == ["v00000002"]
    assert [stored.version for stored in store.versions()] == [1, 3]
    with pytest.raises(DamagedVersionError, match=words):
        store.get(2)
    assert publish(store, idempotency_key="1") == 4, "what cannot be handed out is published anew"


def test_damage_while_running_is_found_by_verify(root: Path) -> None:
    store = WeightStore(root)
    publish(store)
    publish(store)
    store.verify(2)
    _flip(root / "v00000002" / "model.safetensors")
    with pytest.raises(DamagedVersionError):
        store.verify(2)
    assert list(store.damaged) == ["v00000002"]
    assert [stored.version for stored in store.versions()] == [1]


def test_what_is_refused_or_fails_leaves_nothing_behind_and_spends_its_number(root: Path) -> None:
    def refuse(directory: Path, manifest: Manifest) -> None:
        if manifest.train_step == 13:
            raise WeightError("no good")

    store = WeightStore(root, check=refuse)
    for fields, error in (
        ({"train_step": 13}, "no good"),
        ({"metrics": {"loss": float("nan")}}, "metrics"),
        ({"train_step": -1}, "train_step=-1"),
        ({"kind": "DELTA"}, "base_version=None"),
        ({"kind": "DELTA", "base_version": 5}, "version 5 is not in the store.*publish the new version with kind=FULL"),
    ):
        with pytest.raises(WeightError, match=error):
            publish(store, **fields)  # type: ignore[arg-type]
    with pytest.raises(WeightError, match="no safetensors file"):
        store.publish(lambda directory: (directory / "model.safetensors").write_bytes(b"PK"), publication())  # type: ignore[arg-type,return-value]
    with pytest.raises(WeightError, match=r"config\.json"):
        store.publish(
            lambda directory: write_small(0)(directory) or (directory / "config.json").unlink(), publication()
        )
    with pytest.raises(ZeroDivisionError):
        store.publish(lambda directory: 1 / 0, publication())  # type: ignore[arg-type,return-value]
    assert sorted(path.name for path in root.iterdir()) == ["lock", "state.copy.json", "state.json"]
    assert publish(store) == 7


def test_a_full_disk_is_an_error_and_the_store_goes_on(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WeightStore(root)
    publish(store)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("adaflash.training.weight_store.sync_tree", full)
        with pytest.raises(WeightError, match="No space left"):
            publish(store)
    assert publish(store) == 3


def test_listeners_hear_of_versions_and_bad_marks(root: Path) -> None:
    store = WeightStore(root)
    heard: list[int] = []

    def listener() -> None:
        heard.append(len(store.versions()))

    store.add_listener(listener)
    publish(store)
    store.mark_bad(1, "x")
    store.remove_listener(listener)
    publish(store)
    assert heard == [1, 1]


def test_numbers_can_leap_over_those_others_have_seen(root: Path) -> None:
    store = WeightStore(root)
    store.skip_to(58)
    store.skip_to(3)
    store.skip_to(2**60)
    assert publish(reopened(store)) == 58


def test_a_removed_version_stays_readable_for_whom_it_was_opened(root: Path) -> None:
    store = WeightStore(root, keep=1)
    publish(store)
    expected = (root / "v00000001" / "model.safetensors").read_bytes()
    with store.open_file(1, "model.safetensors") as stream:
        publish(store)
        assert stream.read() == expected
    for name in ("../state.json", "lock", "model.delta"):
        with pytest.raises(UnknownVersionError, match="has no file"):
            store.open_file(2, name)


def _die_at(event_number: int, root: Path, report: int) -> None:
    """Publish, mark and retire in a store, and be killed at the n-th time that its files are touched."""
    num_events = 0

    def watch(event: str, args: tuple[object, ...]) -> None:
        nonlocal num_events
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and str(root) in str(args[0]):
            num_events += 1
            if num_events == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    store = WeightStore(root, keep=1)
    for seed in range(2):
        os.write(report, publish(store, seed, idempotency_key=f"{store.next_version}").to_bytes(4, "big"))
        store.mark_bad(store.next_version - 1, "x") if seed == 0 else None
    os._exit(0)


def test_a_kill_at_any_point_loses_nothing_published_and_reuses_no_number(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow, and nothing to a process that dies
    store = WeightStore(root, keep=1)
    highest = publish(store)
    store.close()
    event_number, exit_code = 0, -signal.SIGKILL
    while exit_code == -signal.SIGKILL:
        event_number += 1
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            _die_at(event_number, root, write_end)
        os.close(write_end)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        reported = os.read(read_end, 64)
        seen = [highest, *(int.from_bytes(reported[at : at + 4], "big") for at in range(0, len(reported), 4))]
        os.close(read_end)
        on_disk = [int(path.name[1:]) for path in root.glob("v*")]
        store = WeightStore(root, keep=1)
        assert not store.damaged
        assert not list(root.glob(".*-v*")), "leftovers are removed at open"
        newest = store.versions()[-1].version
        assert newest >= max(seen), "what was reported as published is there"
        highest = publish(store)
        assert highest > max([*seen, *on_disk])
        store.close()
    assert exit_code == 0
    assert event_number > 60, "the kill went through every file operation"
