# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaflash.errors import WeightError
from adaflash.training.manifest import Manifest, TensorInfo, layout_signature
from adaflash.training.version_directory import directory_name, version_of
from adaflash.training.weight_store import WeightStore
from tests.versions import publication, write_small


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    store = WeightStore(tmp_path_factory.mktemp("store"))
    stored = store.get(store.publish(write_small(0), publication(metrics={"loss": 2.5}, idempotency_key="k")))
    return (stored.directory / "manifest.json").read_bytes()


def test_a_manifest_survives_its_file(data: bytes) -> None:
    manifest = Manifest.from_json(data, "m")
    assert manifest.to_json() == data
    assert manifest.metrics == {"loss": 2.5}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.pop("version"), "the field 'version' is missing"),
        (lambda m: m.update(extra=1), "the field 'extra' is unknown"),
        (lambda m: m.update(format=2), "format=2 is invalid: must be 1"),
        (lambda m: m.update(format=True), "format=True is invalid"),
        (lambda m: m.update(version=0), "version=0 is invalid: must be an integer > 0"),
        (lambda m: m.update(version=2**63), "must be an integer > 0"),
        (lambda m: m.update(version="1"), "version='1' is invalid"),
        (lambda m: m.update(kind="PATCH"), "must be FULL or DELTA"),
        (lambda m: m.update(kind=[]), "must be FULL or DELTA"),
        (
            lambda m: m.update(kind="DELTA"),
            r"files are .* must be \['config.json', 'model.delta', 'model.safetensors'\]",
        ),
        (lambda m: m.update(base_sha256="0" * 64), "base_sha256 must be given with kind=DELTA"),
        (lambda m: m.update(layout_signature="0" * 64), "is not that of tensors"),
        (lambda m: m.update(metrics={"loss": "low"}), "must be an object of finite numbers"),
        (lambda m: m.update(metrics={"loss": True}), "must be an object of finite numbers"),
        (lambda m: m["files"].append(dict(m["files"][0])), "files are"),
        (lambda m: m["files"][0].update(name="../../etc/passwd"), "files are"),
        (lambda m: m["files"][0].update(size=-1), "file 0: size=-1 is invalid"),
        (lambda m: m["files"][0].update(sha256="A" * 64), "file 0: sha256='AAA.* must be a sha256"),
        (lambda m: m["tensors"].append(dict(m["tensors"][0])), "lists a name twice"),
        (lambda m: m["tensors"][1].update(shape=[1.0]), r"tensor 1: shape=\[1.0\] is invalid"),
        (lambda m: m["tensors"].append(7), "tensor 2 is a JSON int: must be an object"),
        (lambda m: m.update(tensors={}), "tensors={} is invalid: must be a list"),
        (lambda m: m.update(target_digest="x" * 5000), r"target_digest='x+\.\.\. is invalid"),
    ],
)
def test_what_is_wrong_in_a_manifest_is_named(data: bytes, change: Callable[[Any], object], words: str) -> None:
    values = json.loads(data)
    change(values)
    with pytest.raises(WeightError, match=f"^here:? .*{words}"):
        Manifest.from_json(json.dumps(values).encode(), "here")


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b"{", b"\x80\x04K\x01.", b"[" * 50_000, b" " * (17 << 20)])
def test_what_is_no_manifest_is_refused(raw: bytes) -> None:
    with pytest.raises(WeightError, match=r"^here "):
        Manifest.from_json(raw, "here")


def test_the_signature_depends_on_names_dtypes_and_shapes_alone() -> None:
    tensors = [TensorInfo("a", "F32", (2, 3), 24), TensorInfo("b", "BF16", (6,), 12)]
    signature = layout_signature(tensors)
    assert layout_signature(reversed(tensors)) == signature
    others = [
        ("a", "F32", (3, 2)),
        ("a", "F16", (2, 3)),
        ("c", "F32", (2, 3)),
        ("a", "F32", (2, 3, 1)),
        ("a", "F32", ()),
    ]
    signatures = {layout_signature([TensorInfo(*other, 24), tensors[1]]) for other in others}
    assert len(signatures | {signature}) == 6


@pytest.mark.parametrize("version", [1, 12, 99_999_999, 100_000_000, 2**62])
def test_a_directory_is_named_after_its_version(version: int) -> None:
    assert version_of(directory_name(version)) == version


@pytest.mark.parametrize(
    "name", ["v00000000", "v1", "v000000001", "x00000001", "v0000000a", "v00000001.bak", ".staging-v00000001"]
)
def test_other_names_are_no_versions(name: str, tmp_path: Path) -> None:
    assert version_of(name) is None
