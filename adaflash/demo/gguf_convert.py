# SPDX-License-Identifier: Apache-2.0
"""Turns one Llama GGUF file into a Hugging Face model directory: fp32 weights, config, tokenizer with chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from adaflash.errors import AdaFlashError, CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

Progress = Callable[[int, int], None]
FloatArray = npt.NDArray[np.float32]

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
# GGUF token types (llama.cpp `llama_token_type`).
_CONTROL, _USER_DEFINED = 3, 4


class SpecialTokens(NamedTuple):
    """The tokens with a role, by id."""

    bos: int
    eos: int
    unk: int
    pad: int


def open_gguf(path: Path) -> GGUFReader:
    """Open a GGUF file for reading.

    Raises:
        AdaFlashError: The `gguf` package is not installed.
        CheckpointError: The file is not GGUF, or is truncated.
    """
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise AdaFlashError("the demo model needs the package 'gguf': pip install 'adaflash[demo]'") from error
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from error


def convert_llama_gguf(source: Path, target_dir: Path, progress: Progress | None = None) -> None:
    """Write `source` as a Hugging Face Llama checkpoint with its tokenizer into the existing folder `target_dir`.

    Args:
        source: A GGUF file of architecture `llama`, any quantisation the `gguf` package can undo.
        target_dir: Existing folder; files in it are overwritten.
        progress: Called with (fp32 bytes done, fp32 bytes in all).

    Raises:
        CheckpointError: Another architecture or tokenizer kind, or a tensor or key that is missing or unknown.
    """
    from safetensors.numpy import save_file

    reader = open_gguf(source)
    architecture = _text(reader, "general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{source}: architecture {architecture!r} cannot be converted: only 'llama'")
    tensors = dequantize_tensors(reader, progress)
    _write_json(target_dir / "config.json", llama_config(reader, tied="lm_head.weight" not in tensors))
    special = special_tokens(reader)
    generation = {"bos_token_id": special.bos, "eos_token_id": special.eos, "pad_token_id": special.pad}
    _write_json(target_dir / "generation_config.json", {"_from_model_config": True, **generation})
    build_tokenizer(reader).save(str(target_dir / "tokenizer.json"), pretty=False)
    _write_json(target_dir / "tokenizer_config.json", tokenizer_config(reader))
    save_file(tensors, target_dir / "model.safetensors", metadata={"format": "pt"})


def llama_config(reader: GGUFReader, *, tied: bool) -> dict[str, object]:
    """Return the `config.json` of a Llama GGUF; `tied` says that the LM head is the embedding."""
    num_heads = _integer(reader, "llama.attention.head_count")
    hidden_size = _integer(reader, "llama.embedding_length")
    special = special_tokens(reader)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": _integer(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _integer(reader, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _integer(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "vocab_size": len(_list(reader, "tokenizer.ggml.tokens")),
        "max_position_embeddings": _integer(reader, "llama.context_length"),
        "rms_norm_eps": _float(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _float(reader, "llama.rope.freq_base"),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "dtype": "float32",
        "torch_dtype": "float32",
        "bos_token_id": special.bos,
        "eos_token_id": special.eos,
        "pad_token_id": special.pad,
    }


def dequantize_tensors(reader: GGUFReader, progress: Progress | None = None) -> dict[str, FloatArray]:
    """Return every tensor in fp32 under its Hugging Face name, with q and k rows in Hugging Face order.

    Raises:
        CheckpointError: A tensor this converter does not know; dropping it would change the model.
    """
    from gguf.quants import dequantize

    num_heads = _integer(reader, "llama.attention.head_count")
    num_kv_heads = _integer(reader, "llama.attention.head_count_kv")
    total_bytes = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    done_bytes = 0
    converted: dict[str, FloatArray] = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if name.endswith("q_proj.weight"):
            weight = unpermute_rope_rows(weight, num_heads)
        elif name.endswith("k_proj.weight"):
            weight = unpermute_rope_rows(weight, num_kv_heads)
        converted[name] = weight
        done_bytes += weight.nbytes
        if progress is not None:
            progress(done_bytes, total_bytes)
    return converted


def unpermute_rope_rows(weight: FloatArray, num_heads: int) -> FloatArray:
    """Undo llama.cpp's row order of q and k: per head, pairs (i, i + D/2) were stored next to each other.

    Args:
        weight: [num_heads * D, hidden], rows of each head interleaved as 0, D/2, 1, D/2 + 1, ...
        num_heads: Heads stacked in the rows.

    Returns:
        The same rows, each head in the order 0, 1, ..., D - 1.
    """
    num_rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, num_rows // num_heads // 2, 2, hidden)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(num_rows, hidden))


def build_tokenizer(reader: GGUFReader) -> Tokenizer:
    """Rebuild the byte-level BPE tokenizer (pre-tokenizer `smollm`: single digits, then GPT-2's split).

    Raises:
        CheckpointError: The file holds another kind of tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, split = _text(reader, "tokenizer.ggml.model"), _text(reader, "tokenizer.ggml.pre")
    if (kind, split) != ("gpt2", "smollm"):
        raise CheckpointError(
            f"tokenizer model={kind!r} pre={split!r} cannot be rebuilt: only model='gpt2' pre='smollm'"
        )
    tokens = [str(token) for token in _list(reader, "tokenizer.ggml.tokens")]
    types = _list(reader, "tokenizer.ggml.token_type")
    merges = [_merge_pair(str(merge)) for merge in _list(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in kinds if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in kinds if k == _USER_DEFINED])
    return tokenizer


def tokenizer_config(reader: GGUFReader) -> dict[str, object]:
    """Return `tokenizer_config.json`: special tokens by role, length limit, chat template when there is one."""
    tokens = [str(token) for token in _list(reader, "tokenizer.ggml.tokens")]
    special = special_tokens(reader)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[special.bos],
        "eos_token": tokens[special.eos],
        "unk_token": tokens[special.unk],
        "pad_token": tokens[special.pad],
        "model_max_length": _integer(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    if "tokenizer.chat_template" in reader.fields:
        config["chat_template"] = _text(reader, "tokenizer.chat_template")
    return config


def special_tokens(reader: GGUFReader) -> SpecialTokens:
    """Return the ids of the tokens with a role."""
    keys = ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
    return SpecialTokens(*(_integer(reader, f"tokenizer.ggml.{key}") for key in keys))


def _hf_name(name: str) -> str:
    parts = name.split(".", 2)
    hf_name = _GLOBAL_NAMES.get(name)
    if hf_name is None and len(parts) == 3 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES:
        hf_name = f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}"
    if hf_name is None:
        raise CheckpointError(f"GGUF tensor {name!r} has no place in a Llama checkpoint")
    return hf_name


def _merge_pair(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not (left and separator and right):
        raise CheckpointError(f"GGUF merge {merge!r} is not two tokens separated by a space")
    return left, right


def _field(reader: GGUFReader, key: str) -> object:
    field = reader.fields.get(key)
    if field is None:
        raise CheckpointError(f"GGUF key {key!r} is missing")
    value: object = field.contents()
    return value


def _text(reader: GGUFReader, key: str) -> str:
    return str(_field(reader, key))


def _integer(reader: GGUFReader, key: str) -> int:
    value = _field(reader, key)
    if not isinstance(value, int):
        raise CheckpointError(f"GGUF key {key!r} is {value!r}: must be an integer")
    return value


def _float(reader: GGUFReader, key: str) -> float:
    value = _field(reader, key)
    if not isinstance(value, float):
        raise CheckpointError(f"GGUF key {key!r} is {value!r}: must be a float")
    # GGUF stores float32: print its shortest decimal (1e-05), not the double nearest to it (9.999999747e-06).
    return float(str(np.float32(value)))


def _list(reader: GGUFReader, key: str) -> list[object]:
    value = _field(reader, key)
    if not isinstance(value, list):
        raise CheckpointError(f"GGUF key {key!r} is not an array")
    return value


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
