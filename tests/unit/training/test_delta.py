# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import random
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash.durable_files import hash_file
from adaflash.errors import PayloadError
from adaflash.training.delta import apply_delta, write_delta
from adaflash.training.manifest import Manifest
from adaflash.training.weight_store import WeightStore
from tests.versions import publication, write_small


def _files(folder: Path, old: bytes, new: bytes) -> tuple[Path, Path, Path]:
    base, current, delta = folder / "base", folder / "new", folder / "delta"
    base.write_bytes(old)
    current.write_bytes(new)
    return base, current, delta


def _apply(base: Path, delta: Path, new: bytes, base_sha256: str | None = None, size: int | None = None) -> Path:
    result = base.with_name("result")
    sha256 = hashlib.sha256(new).hexdigest()
    apply_delta(base, base_sha256 or hash_file(base), delta, result, len(new) if size is None else size, sha256)
    return result


def _sparse(seed: int, old: bytes, num_changes: int) -> bytes:
    rng, new = random.Random(seed), bytearray(old)
    for _ in range(num_changes):
        new[rng.randrange(len(new))] ^= 1 << rng.randrange(8)
    return bytes(new)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1000, 40_000),
    num_changes=st.integers(0, 50),
    chunk=st.integers(1, 3000),
)
def test_a_delta_leads_back_to_the_bytes(tmp_path_factory, seed, size, num_changes, chunk) -> None:  # type: ignore[no-untyped-def]
    old = random.Random(seed).randbytes(size)
    new = _sparse(seed, old, num_changes)
    base, current, delta = _files(tmp_path_factory.mktemp("delta"), old, new)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adaflash.training.delta._CHUNK_BYTES", chunk)
        assert write_delta(base, current, delta)
        assert _apply(base, delta, new).read_bytes() == new
    assert delta.stat().st_size < size / 2


def test_no_delta_where_it_would_not_be_smaller(tmp_path: Path) -> None:
    rng = random.Random(0)
    for old, new in ((rng.randbytes(100), rng.randbytes(100)), (bytes(100), bytes(101)), (bytes(101), bytes(100))):
        base, current, delta = _files(tmp_path, old, new)
        assert not write_delta(base, current, delta)
        assert not delta.exists()


OLD = random.Random(1).randbytes(5000)
NEW = _sparse(1, OLD, 20)


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path]:
    base, current, delta = _files(tmp_path, OLD, NEW)
    assert write_delta(base, current, delta)
    return base, delta


def test_another_base_is_refused(made: tuple[Path, Path]) -> None:
    base, delta = made
    right = hash_file(base)
    base.write_bytes(_sparse(2, OLD, 1))
    with pytest.raises(PayloadError, match=r"base .* has sha256 .* send FULL"):
        _apply(base, delta, NEW, right)
    base.unlink()
    with pytest.raises(PayloadError, match=r"base .* cannot be read .* send FULL"):
        _apply(base, delta, NEW, right)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "truncated"),
        (b"not zlib", "corrupt"),
        (zlib.compress(bytes(5000)), "another sha256"),
        (zlib.compress(bytes(4999)), "4999 bytes"),
        (zlib.compress(bytes(5001)), "more than the 5000 bytes"),
        (zlib.compress(bytes(100_000_000), 1), "more than the 5000 bytes"),
    ],
    ids=["empty", "garbage", "no change", "short", "long", "bomb"],
)
def test_a_wrong_delta_is_refused_and_leaves_no_result(made: tuple[Path, Path], data: bytes, words: str) -> None:
    base, delta = made
    delta.write_bytes(data)
    with pytest.raises(PayloadError, match=rf"{words}.*send FULL"):
        _apply(base, delta, NEW)
    assert not (base.parent / "result").exists()


def test_a_flipped_cut_or_longer_delta_is_refused(made: tuple[Path, Path]) -> None:
    base, delta = made
    data = delta.read_bytes()
    flipped = [bytes([*data[:at], data[at] ^ 1 << at % 8, *data[at + 1 :]]) for at in range(len(data))]
    cut = [data[:at] for at in range(len(data))]
    for damaged in [*flipped, *cut, data + b"\0", data + data]:
        delta.write_bytes(damaged)
        # zlib does not check every bit of its own header, so some flips change nothing: the result is right then.
        try:
            result = _apply(base, delta, NEW)
        except PayloadError:
            continue
        assert result.read_bytes() == NEW


def test_a_delta_version_holds_both_the_difference_and_the_whole(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")

    def write(directory: Path) -> None:
        write_small(0, 4096)(directory)
        path = directory / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)

    first = store.publish(write_small(0, 4096), publication())
    second = store.publish(write, publication(kind="DELTA", base_version=first))
    manifest: Manifest = store.get(second).manifest
    base = store.get(first)
    assert (manifest.kind, manifest.base_version) == ("DELTA", first)
    assert manifest.base_sha256 == base.manifest.file("model.safetensors").sha256
    info, directory = manifest.file("model.safetensors"), store.get(second).directory
    assert manifest.file("model.delta").size < info.size / 10
    result = tmp_path / "result"
    base_file = base.directory / "model.safetensors"
    apply_delta(base_file, manifest.base_sha256 or "", directory / "model.delta", result, info.size, info.sha256)
    assert result.read_bytes() == (directory / "model.safetensors").read_bytes()


def test_a_difference_that_does_not_pay_is_published_whole(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    first = store.publish(write_small(0, 64), publication())
    second = store.publish(write_small(1, 128), publication(kind="DELTA", base_version=first))
    manifest = store.get(second).manifest
    assert (manifest.kind, manifest.base_version, manifest.base_sha256) == ("FULL", first, None)
    assert not (store.get(second).directory / "model.delta").exists()
