# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file

from adaflash.errors import PayloadError
from adaflash.training.drafter_layout import DrafterLayout
from adaflash.training.manifest import Manifest
from adaflash.training.payload import PayloadChecker, PayloadLimits
from adaflash.training.version_directory import write_manifest
from tests.versions import TARGET_DIGEST, Tensors, publication, tiny_drafter, write_like

HEAD = "thresh_head_two_model."


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter(tmp_path_factory.mktemp("tiny"), draft_vocab_size=40)


@pytest.fixture(scope="module")
def checker(drafter: Path) -> PayloadChecker:
    return PayloadChecker(DrafterLayout.of(drafter), TARGET_DIGEST)


def staged(directory: Path, drafter: Path, change: Callable[[Tensors], object] | None = None) -> Manifest:
    """Write a version as a trainer would, whatever `change` makes of its tensors."""
    directory.mkdir(exist_ok=True)
    write_like(drafter, 1, change)(directory)
    return write_manifest(directory, 5, publication(), None).manifest


def test_a_version_of_the_same_drafter_is_accepted(tmp_path: Path, drafter: Path, checker: PayloadChecker) -> None:
    checker.check(tmp_path, staged(tmp_path, drafter))


def test_a_version_is_accepted_whatever_names_the_served_checkpoint_has(tmp_path: Path, drafter: Path) -> None:
    served = tmp_path / "served"
    shutil.copytree(drafter, served)
    tensors: Tensors = {f"model.{name}": values for name, values in load_file(drafter / "model.safetensors").items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(tensors, served / "model.safetensors")
    PayloadChecker(DrafterLayout.of(served), TARGET_DIGEST).check(tmp_path, staged(tmp_path, drafter))


def _transpose(tensors: Tensors) -> None:
    tensors["fc.weight"] = np.ascontiguousarray(tensors["fc.weight"].T)


def _spoil(name: str, index: int, value: float) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        tensors[name].reshape(-1)[index] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("norm.weight"), r"tensor norm\.weight is missing: must be \[32\] F32"),
        (lambda t: t.pop(HEAD + "out.bias"), r"tensor thresh_head_two_model\.out\.bias is missing: must be \[1\] F32"),
        (_transpose, r"tensor fc\.weight is \[64, 32\] F32: must be \[32, 64\] F32, as being served"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].astype(np.float16)}), r"is \[32, 64\] F16: must be"),
        (
            lambda t: t.update({"extra": np.ones(1)}),
            r"tensor extra is unexpected: must be one of the 32 of the drafter",
        ),
        (lambda t: t.update({"../../etc/passwd": np.ones(1)}), "tensor ../../etc/passwd is unexpected"),
        (lambda t: t.update({"n\n\u202e": np.ones(1)}), r"tensor 'n\\n\\u202e' is unexpected"),
        (lambda t: t.update({"x" * 3000: np.ones(1)}), r"tensor x{97}\.\.\. is unexpected"),
        (lambda t: t.update({"lm_head.weight": np.ones((97, 32))}), "is the target's LM head: versions hold"),
        (lambda t: t.update({"model.embed_tokens.weight": np.ones((97, 32))}), "is the target's embedding"),
        (lambda t: t.update({HEAD + "res.1.weight": np.ones((8, 8))}), "is of a length head: must not be there"),
        (_spoil("fc.weight", 2047, np.nan), r"tensor fc\.weight is not finite at element 2047"),
        (
            _spoil("layers.1.mlp.down_proj.weight", 0, -np.inf),
            "layers.1.mlp.down_proj.weight is not finite at element 0",
        ),
        (_spoil(HEAD + "out.bias", 0, np.inf), "out.bias is not finite at element 0"),
        (_spoil("d2t", 3, 96), "tensor d2t is not learned: must be byte for byte"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_with_what_is_allowed(
    tmp_path: Path, drafter: Path, checker: PayloadChecker, change: Callable[[Tensors], object], words: str
) -> None:
    with pytest.raises(PayloadError, match=words):
        checker.check(tmp_path, staged(tmp_path, drafter, change))


def test_a_non_finite_value_is_found_behind_the_first_chunk_and_in_bfloat16(
    tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaflash.training.drafter_layout._CHUNK_BYTES", 64)
    served = tmp_path / "served"
    shutil.copytree(drafter, served)
    tensors = {name: torch.from_numpy(values) for name, values in load_file(drafter / "model.safetensors").items()}
    halves = {name: values.bfloat16() if values.is_floating_point() else values for name, values in tensors.items()}
    save_torch_file(halves, served / "model.safetensors")
    checker = PayloadChecker(DrafterLayout.of(served), TARGET_DIGEST)
    checker.check(served, write_manifest(served, 5, publication(), None).manifest)
    halves["fc.weight"][7, 5] = torch.nan
    save_torch_file(halves, served / "model.safetensors")
    with pytest.raises(PayloadError, match=rf"fc\.weight is not finite at element {7 * 64 + 5}"):
        checker.check(served, write_manifest(served, 5, publication(), None).manifest)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 5}, "draft_block_size=5 is invalid: must be 4, as being served"),
        ({"rope_theta": 5000.0}, "rope=.*as being served"),
        ({"num_hidden_layers": 3}, "is no drafter's|layer"),
        ({"architectures": ["Other"]}, "architectures"),
        ({"rms_norm_eps": 10**400}, r"config\.json"),
        ({"head_dim": [[]]}, "head_dim"),
        ({"dflash_config": 3}, "dflash_config"),
    ],
)
def test_another_architecture_is_refused(
    tmp_path: Path, drafter: Path, checker: PayloadChecker, change: dict[str, object], words: str
) -> None:
    staged(tmp_path, drafter)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PayloadError, match=words):
        checker.check(tmp_path, write_manifest(tmp_path, 5, publication(), None).manifest)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b'{"a":1,"a":1}'])
def test_a_config_that_is_none_is_refused(tmp_path: Path, drafter: Path, checker: PayloadChecker, data: bytes) -> None:
    staged(tmp_path, drafter)
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(PayloadError):
        checker.check(tmp_path, write_manifest(tmp_path, 5, publication(), None).manifest)


def test_another_target_is_refused(tmp_path: Path, drafter: Path, checker: PayloadChecker) -> None:
    manifest = dataclasses.replace(staged(tmp_path, drafter), target_digest="other")
    with pytest.raises(PayloadError, match=f"target_digest=other is another target's: must be {TARGET_DIGEST}"):
        checker.check_manifest(manifest)


def test_an_offer_of_another_layout_is_refused_before_anything_is_fetched(checker: PayloadChecker) -> None:
    with pytest.raises(PayloadError, match=r"layout_signature=abc is another drafter's"):
        checker.check_offer(TARGET_DIGEST, "abc", 10)
    checker.check_offer(TARGET_DIGEST, checker.layout.signature, 10)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_bytes": 1000}, "bytes: must have at most 1000"),
        ({"max_tensors": 5}, "has 32 tensors: must have at most 5"),
        ({"max_header_bytes": 100}, "header of .* at most 100"),
    ],
)
def test_sizes_are_limited(tmp_path: Path, drafter: Path, limits: Any, words: str) -> None:
    checker = PayloadChecker(DrafterLayout.of(drafter), TARGET_DIGEST, PayloadLimits(**limits))
    with pytest.raises(PayloadError, match=words):
        checker.check(tmp_path, staged(tmp_path, drafter))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_must_be_there_whole_and_plain(
    tmp_path: Path, drafter: Path, checker: PayloadChecker, name: str
) -> None:
    manifest = staged(tmp_path, drafter)
    path, data = tmp_path / name, (tmp_path / name).read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(PayloadError, match=rf"{name} has {len(data) - 1} bytes: must have {len(data)}"):
        checker.check(tmp_path, manifest)
    path.unlink()
    with pytest.raises(PayloadError, match=rf"{name} is missing"):
        checker.check(tmp_path, manifest)
    (tmp_path / "elsewhere").write_bytes(data)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PayloadError, match="no plain file"):
        checker.check(tmp_path, manifest)
