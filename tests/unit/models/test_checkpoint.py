# SPDX-License-Identifier: Apache-2.0
"""Loading: shards, dtypes, progress, peak memory, and errors that name file, tensor and shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaflash.errors import CheckpointError
from adaflash.models.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from adaflash.models.layers import checkpoint_slots
from adaflash.models.loader import load_target
from adaflash.ops.backend import Backend


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Apply `change` to the tensors of the single-file checkpoint in `directory`."""
    tensors = load_file(directory / SINGLE_FILE)
    change(tensors)
    save_file(tensors, directory / SINGLE_FILE)


def test_sharded_and_single_file_checkpoints_load_alike(tmp_path: Path, backend: Backend, tiny_llama: Any) -> None:
    reference = tiny_llama(tmp_path / "single")
    tiny_llama(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    expected = reference.state_dict()
    for name in ("single", "sharded"):
        model: Any = load_target(tmp_path / name, backend)
        slots = checkpoint_slots(model)
        assert slots.keys() == expected.keys()
        assert all(torch.equal(slots[key], expected[key]) for key in expected)


def test_weights_are_cast_while_loading(tmp_path: Path, backend: Backend, tiny_llama: Any) -> None:
    reference = tiny_llama(tmp_path, dtype=torch.bfloat16)
    model: Any = load_target(tmp_path, backend, dtype=torch.float32)
    weight = checkpoint_slots(model)["model.layers.1.self_attn.k_proj.weight"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, reference.model.layers[1].self_attn.k_proj.weight.float())


def test_progress_ends_at_the_total(tmp_path: Path, backend: Backend, tiny_llama: Any) -> None:
    tiny_llama(tmp_path)
    calls: list[tuple[int, int]] = []
    load_target(tmp_path, backend, progress=lambda done, total: calls.append((done, total)))
    expected = sum(tensor.nbytes for tensor in load_file(tmp_path / SINGLE_FILE).values())
    assert calls[-1] == (expected, expected)
    assert calls == sorted(calls)


def test_tensors_larger_than_a_chunk_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaflash.models.safetensors_file._CHUNK_BYTES", 64)
    tensors = {"a": torch.randn(7, 13), "b": torch.arange(5), "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    save_file(tensors, tmp_path / SINGLE_FILE)
    entries = Checkpoint(tmp_path).entries
    assert entries.keys() == tensors.keys()
    assert all(torch.equal(entries[name].read(), tensor) for name, tensor in tensors.items())


def test_known_extras_are_ignored(tmp_path: Path, backend: Backend, tiny_llama: Any) -> None:
    tiny_llama(tmp_path, {"tie_word_embeddings": True})
    extras = {"lm_head.weight": torch.zeros(97, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    rewrite(tmp_path, lambda tensors: tensors.update(extras))
    load_target(tmp_path, backend)


def test_every_misfit_is_named_at_once(tmp_path: Path, backend: Backend, tiny_qwen3: Any) -> None:
    tiny_qwen3(tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.2.self_attn.q_norm.weight"], tensors["lm_head.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(40, 32)

    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        load_target(tmp_path, backend)
    message = str(caught.value)
    assert "Qwen3ForCausalLM" in message
    assert "2 missing: model.layers.2.self_attn.q_norm.weight, lm_head.weight" in message
    assert "1 unexpected: model.layers.0.self_attn.q_proj.bias (model.safetensors)" in message
    assert "model.layers.1.mlp.up_proj.weight (model.safetensors): expected [48, 32], found [40, 32]" in message


def test_long_lists_of_names_are_shortened_with_a_count(tmp_path: Path, backend: Backend, tiny_llama: Any) -> None:
    tiny_llama(tmp_path)
    rewrite(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers." in name])
    with pytest.raises(CheckpointError, match=r"27 missing: .* and 19 more"):
        load_target(tmp_path, backend)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, backend: Backend, tiny_llama: Any, kept: int) -> None:
    tiny_llama(tmp_path)
    path = tmp_path / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is (corrupt or )?truncated"):
        load_target(tmp_path, backend)


def safetensors_bytes(header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"\xff\xfe garbage", "not a safetensors header"),
        ([1], "not a safetensors header"),
        ({"w": 3}, "tensor w has the header entry 3"),
        ({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}, "tensor w has the header entry"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "takes 8 bytes, its header entry has 4"),
        ({"w": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}, "dtype F8_E4M3: must be one of F64"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "tensor w begins at byte"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "truncated"),
    ],
)
def test_a_corrupt_header_is_named(tmp_path: Path, header: object, words: str) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(safetensors_bytes(header))
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoint(tmp_path)
    assert str(tmp_path / SINGLE_FILE) in str(caught.value)


def test_a_directory_without_safetensors_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .*; found pytorch_model\.bin"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"missing is not a directory"):
        Checkpoint(tmp_path / "missing")


def test_a_missing_shard_is_named(tmp_path: Path, tiny_llama: Any) -> None:
    tiny_llama(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} does not exist, but {INDEX_FILE} names it"):
        Checkpoint(tmp_path)


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path, tiny_llama: Any) -> None:
    tiny_llama(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    index["weight_map"]["model.ghost"] = index["weight_map"]["model.norm.weight"]
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks the tensor model\.ghost"):
        Checkpoint(tmp_path)


def test_an_index_may_not_point_outside_its_directory(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": "../other.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"'\.\./other\.safetensors': must lie beside the index"):
        Checkpoint(tmp_path)


_MEASURE_PEAK = """
import sys
from pathlib import Path
import torch
from adaflash.models.loader import load_target
from adaflash.ops.backend import Backend

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

load_target(Path(sys.argv[1]), Backend("cpu"))  # what the first load imports and allocates is not the checkpoint's
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = memory("VmRSS")
model = load_target(Path(sys.argv[2]), Backend("cpu"))
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_loading_peaks_below_1_3_times_the_checkpoint(tmp_path: Path, tiny_llama: Any) -> None:
    tiny_llama(tmp_path / "small")
    tiny_llama(tmp_path / "large", {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 40_000})
    command = [sys.executable, "-c", _MEASURE_PEAK, str(tmp_path / "small"), str(tmp_path / "large")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    size = (tmp_path / "large" / SINGLE_FILE).stat().st_size
    assert 0.9 * size < int(run.stdout) < 1.3 * size
