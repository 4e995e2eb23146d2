# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from adaflash.demo.gguf_convert import convert_llama_gguf, unpermute_rope_rows
from adaflash.engine.tokenizer import Tokenizer
from adaflash.errors import CheckpointError
from adaflash.request import ChatMessage
from tests.tiny_gguf import TinyGguf, permute_rows, write_tiny_gguf


def test_weights_come_back_under_their_hugging_face_names(tiny_gguf: TinyGguf, tiny_model_dir: Path) -> None:
    loaded = load_file(tiny_model_dir / "model.safetensors")
    assert set(loaded) == set(tiny_gguf.weights)
    for name, weight in tiny_gguf.weights.items():
        assert loaded[name].dtype == np.float32
        tolerance = 0.02 if "mlp" in name else 0.0  # The MLP is stored in 8 bits.
        np.testing.assert_allclose(loaded[name], weight, atol=tolerance, rtol=0, err_msg=name)


@pytest.mark.parametrize("num_heads", [1, 3, 9])
def test_unpermute_undoes_the_order_llama_cpp_stores(num_heads: int) -> None:
    weight = np.random.default_rng(num_heads).standard_normal((num_heads * 8, 5), dtype=np.float32)
    np.testing.assert_array_equal(unpermute_rope_rows(permute_rows(weight, num_heads), num_heads), weight)


def test_config_holds_the_values_of_the_file(tiny_model_dir: Path) -> None:
    config = json.loads((tiny_model_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
    assert [config[key] for key in keys] == [32, 4, 2, 8, 128]
    assert [config[f"{role}_token_id"] for role in ("bos", "eos", "pad")] == [1, 2, 2]


def test_transformers_reads_the_directory(tiny_gguf: TinyGguf, tiny_model_dir: Path) -> None:
    from transformers import LlamaForCausalLM

    model, info = LlamaForCausalLM.from_pretrained(tiny_model_dir, local_files_only=True, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    embedding = model.lm_head.weight.detach().numpy()
    np.testing.assert_array_equal(embedding, tiny_gguf.weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("text", ["hello world", "año 2024: 12.5%", "日本\t🙂\n\n  x", "don't  stop"])
def test_tokenizer_round_trips_text(tiny_model_dir: Path, text: str) -> None:
    tokenizer = Tokenizer(tiny_model_dir)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_uses_merges_special_tokens_and_template(tiny_model_dir: Path) -> None:
    tokenizer = Tokenizer(tiny_model_dir)
    assert len(tokenizer.encode("hello")) == 1
    assert tokenizer.eos_token_id == 2
    assert tokenizer.encode("<|im_end|>") == [2]
    chat = tokenizer.render_chat([ChatMessage("user", "hello")])
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(chat, skip_special_tokens=False) == text
    assert chat[0] == 1


def test_progress_counts_bytes_of_every_tensor(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert_llama_gguf(tiny_gguf.path, tmp_path, lambda done, total: seen.append((done, total)))
    total_bytes = sum(weight.nbytes for weight in tiny_gguf.weights.values())
    assert len(seen) == len(tiny_gguf.weights)
    assert seen[-1] == (total_bytes, total_bytes)


def test_unknown_tensor_fails_by_name(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "extra.gguf", extra_tensor="rope_freqs.weight").path
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        convert_llama_gguf(source, tmp_path)


def test_other_architecture_is_refused(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "other.gguf", architecture="qwen2").path
    with pytest.raises(CheckpointError, match="'qwen2' cannot be converted"):
        convert_llama_gguf(source, tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a gguf file at all", b"GGUF"])
def test_a_file_that_is_not_gguf_is_refused(tiny_gguf: TinyGguf, tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "broken.gguf"
    source.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"broken\.gguf is not a readable GGUF file"):
        convert_llama_gguf(source, tmp_path)


def test_truncated_file_is_refused(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    content = tiny_gguf.path.read_bytes()
    for length in (100, len(content) // 2, len(content) - 1):
        source = tmp_path / "short.gguf"
        source.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"short\.gguf is not a readable GGUF file"):
            convert_llama_gguf(source, tmp_path)
