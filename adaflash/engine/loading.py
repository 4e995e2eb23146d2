# SPDX-License-Identifier: Apache-2.0
"""Loads what a config names, sizes the KV pool, and puts the runner together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import torch

from adaflash.cache.kv_cache import KVCache, kv_bytes_per_block
from adaflash.config import EngineConfig, VerifyPolicyName
from adaflash.demo.drafter import demo_drafter_dir
from adaflash.demo.model import DEMO_MODEL_NAME, demo_model_dir
from adaflash.engine.graphs import DummyBlocks, GraphSetting
from adaflash.engine.runner import Runner
from adaflash.engine.sampling import SamplingBuilder
from adaflash.engine.tokenizer import Tokenizer, has_tokenizer
from adaflash.errors import BackendError, ConfigError
from adaflash.models.base import TargetModel
from adaflash.models.loader import load_target
from adaflash.ops.backend import Backend
from adaflash.ops.registry import load_backend
from adaflash.request import EngineInfo
from adaflash.speculative.base import Drafter
from adaflash.speculative.drafter_loader import load_drafter
from adaflash.speculative.resident import ResidentDrafters

logger = logging.getLogger(__name__)

LoadProgress = Callable[[str, int, int], None]

# Drafts are drawn from the drafter's most likely tokens only: half the noise, see docs/adr/0003.
DRAFT_TOP_K = 1024

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedEngine:
    """Models, pools and limits an engine runs on.

    Attributes:
        runner: The device side.
        num_kv_blocks: Size of the KV pool.
        block_size: Tokens per KV block.
        max_model_len: Longest prompt + output.
        tokenizer: None when the checkpoint brings none: prompts are token ids then.
        info: What is being served.
    """

    runner: Runner
    num_kv_blocks: int
    block_size: int
    max_model_len: int
    tokenizer: Tokenizer | None
    info: EngineInfo


def load_engine(config: EngineConfig, progress: LoadProgress | None = None) -> LoadedEngine:
    """Load everything `config` names.

    Raises:
        ConfigError: Settings that do not fit each other or the model.
        CheckpointError: A checkpoint is missing, corrupt or does not fit.
        BackendError: The device is not available.
    """
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} is invalid: "
            f"must be >= max_num_seqs={config.max_num_seqs}"
        )
    backend = load_backend(config.device)
    _set_strict(config, backend)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    model_dir, draft_dir = resolve_checkpoints(config, progress)
    dtype = None if config.dtype == "auto" else _DTYPES[config.dtype]
    target = load_target(model_dir, backend, dtype, _named(progress, "target"))
    drafter = None
    if draft_dir is not None:
        drafter = load_drafter(draft_dir, target, backend, target.dtype, _named(progress, "drafter"))
        drafter.pack()
    _check_num_speculative_tokens(config, drafter)
    _check_draft_block_size(backend, drafter)
    target.pack()
    tokenizer_dir = Path(config.tokenizer) if config.tokenizer else model_dir
    tokenizer = Tokenizer(tokenizer_dir) if config.tokenizer or has_tokenizer(tokenizer_dir) else None
    names = (DEMO_MODEL_NAME if config.model is None else str(model_dir), None if draft_dir is None else str(draft_dir))
    return assemble(config, backend, target, drafter, tokenizer, names)


def assemble(
    config: EngineConfig,
    backend: Backend,
    target: TargetModel,
    drafter: Drafter | None,
    tokenizer: Tokenizer | None,
    names: tuple[str, str | None],
) -> LoadedEngine:
    """Size and allocate the KV pools for loaded models, and build the runner.

    Args:
        config: Limits.
        backend: The device.
        target: Packed target.
        drafter: Packed drafter, or None.
        tokenizer: Or None.
        names: Names of target and drafter to report.
    """
    block_size = config.block_size or backend.preferred_block_size
    shapes = _kv_shapes(target, drafter)
    num_blocks, max_model_len = _size_pool(config, backend, target, shapes, block_size)
    graphs = _graph_setting(config, backend, drafter, num_blocks, block_size, max_model_len)
    num_dummies = 0 if graphs is None else len(graphs.dummies.table)
    pools = [_allocate(backend, shape, num_blocks + num_dummies, block_size, target.dtype) for shape in shapes]
    keep_draft_logits = config.sampling_coupling == "rejection"
    # Under rejection q must be what the drafts were drawn from; under the Gumbel coupling any draft is lawful.
    draft_top_k = None if keep_draft_logits else DRAFT_TOP_K
    sampling = SamplingBuilder(target.config.vocab_size, backend.device, draft_top_k)
    draft_kv = pools[1] if drafter is not None else None
    drafters = None if drafter is None else ResidentDrafters(drafter, graphs is not None)
    runner = Runner(backend, target, pools[0], drafters, draft_kv, sampling, keep_draft_logits)
    if graphs is not None:
        runner.make_graphs(graphs)
    info = EngineInfo(
        model=names[0],
        draft=names[1],
        device=backend.name,
        dtype=str(target.dtype).removeprefix("torch."),
        vocab_size=target.config.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=block_size,
        num_kv_blocks=num_blocks,
        verify_policy=resolve_policy(config.verify_policy, drafter),
        sampling_coupling=config.sampling_coupling,
        draft_block_size=None if drafter is None else drafter.draft_block_size,
        drafter_version=None if drafter is None else drafter.version,
        eos_token_ids=target.config.eos_token_ids,
        op_table={op: "native" if native else "reference" for op, native in backend.native_ops().items()},
    )
    return LoadedEngine(runner, num_blocks, block_size, max_model_len, tokenizer, info)


def resolve_checkpoints(config: EngineConfig, progress: LoadProgress | None) -> tuple[Path, Path | None]:
    """Return the directories of target and drafter; no `model` means the embedded demo model and its drafter."""
    if config.model is not None:
        return Path(config.model), None if config.draft is None else Path(config.draft)
    model_dir = demo_model_dir(_named(progress, "converting the demo model"))
    return model_dir, demo_drafter_dir() if config.draft is None else Path(config.draft)


def resolve_policy(name: str, drafter: Drafter | None) -> str:
    """Return the policy `auto` stands for, or `name` after checking that what it needs is there.

    Raises:
        ConfigError: The policy is unknown, or needs a drafter or a length head that is not there.
    """
    if name == "auto":
        return "off" if drafter is None else "goodput"
    if name not in get_args(VerifyPolicyName):
        raise ConfigError(f"verify_policy={name!r} is invalid: must be one of {', '.join(get_args(VerifyPolicyName))}")
    if name != "off" and drafter is None:
        raise ConfigError(f"verify_policy={name!r} needs a drafter: give --draft, or use off")
    if name == "length_head" and (drafter is None or drafter.length_head is None):
        raise ConfigError("verify_policy='length_head' needs a drafter whose checkpoint has a length head; it has none")
    return name


def _graph_setting(
    config: EngineConfig,
    backend: Backend,
    drafter: Drafter | None,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
) -> GraphSetting | None:
    """Return how forwards are captured; None where they are not."""
    width = 1 if drafter is None else drafter.draft_block_size
    buckets = None if config.enforce_eager else backend.graph_buckets(config.max_num_seqs, config.max_num_seqs * width)
    if buckets is None:
        return None
    dummies = DummyBlocks(num_blocks, DummyBlocks.needed(buckets, width, block_size), block_size)
    longest = -(-(max_model_len + width) // block_size)
    return GraphSetting(backend, buckets, dummies, block_size, max(longest, len(dummies.table)))


def _size_pool(
    config: EngineConfig, backend: Backend, target: TargetModel, shapes: list[_KvShape], block_size: int
) -> tuple[int, int]:
    """Return (number of KV blocks, max_model_len)."""
    limit = target.config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is invalid: must be <= {limit}, the target's own limit"
        )
    wanted_len = config.max_model_len or limit
    num_blocks = config.num_kv_blocks or _blocks_in_memory(
        config, backend, shapes, target.dtype, block_size, wanted_len
    )
    if num_blocks * block_size >= wanted_len:
        return num_blocks, wanted_len
    if config.max_model_len is not None or num_blocks * block_size < 2:
        needed = -(-wanted_len // block_size)
        raise ConfigError(
            f"the KV pool holds {num_blocks} blocks of {block_size} tokens, max_model_len={wanted_len} needs {needed}: "
            "raise kv_cache_memory_bytes or num_kv_blocks, or lower max_model_len"
        )
    logger.warning("max_model_len cut to the KV pool max_model_len=%d limit=%d", num_blocks * block_size, limit)
    return num_blocks, num_blocks * block_size


def _blocks_in_memory(
    config: EngineConfig,
    backend: Backend,
    shapes: list[_KvShape],
    dtype: torch.dtype,
    block_size: int,
    max_model_len: int,
) -> int:
    per_block = sum(
        kv_bytes_per_block(shape.num_layers, block_size, shape.num_kv_heads, shape.head_dim, dtype) for shape in shapes
    )
    if config.kv_cache_memory_bytes is not None:
        return max(1, config.kv_cache_memory_bytes // per_block)
    useful = config.max_num_seqs * (-(-max_model_len // block_size) + 1)
    budget = backend.default_kv_cache_bytes(config.gpu_memory_utilization)
    return max(1, min(useful, budget // per_block))


class _KvShape(NamedTuple):
    num_layers: int
    num_kv_heads: int
    head_dim: int


def _kv_shapes(target: TargetModel, drafter: Drafter | None) -> list[_KvShape]:
    shapes = [_KvShape(target.config.num_layers, target.config.num_kv_heads, target.config.head_dim)]
    if drafter is not None:
        shapes.append(_KvShape(drafter.num_layers, drafter.num_kv_heads, drafter.head_dim))
    return shapes


def _allocate(backend: Backend, shape: _KvShape, num_blocks: int, block_size: int, dtype: torch.dtype) -> KVCache:
    return KVCache.allocate(
        backend, shape.num_layers, num_blocks, block_size, shape.num_kv_heads, shape.head_dim, dtype
    )


def _check_num_speculative_tokens(config: EngineConfig, drafter: Drafter | None) -> None:
    wanted = config.num_speculative_tokens
    if wanted is None:
        return
    if drafter is None:
        raise ConfigError(f"num_speculative_tokens={wanted} has no effect without a drafter: give --draft")
    if wanted > drafter.draft_block_size - 1:
        raise ConfigError(
            f"num_speculative_tokens={wanted} is invalid: the drafter proposes {drafter.draft_block_size - 1} at most"
        )


def _check_draft_block_size(backend: Backend, drafter: Drafter | None) -> None:
    limit = backend.max_draft_block_size
    if drafter is not None and limit is not None and drafter.draft_block_size > limit:
        raise BackendError(
            f"the drafter's block_size={drafter.draft_block_size} is invalid on {backend.name}: must be <= {limit}; "
            "serve with a drafter of narrower blocks, or without one"
        )


def _set_strict(config: EngineConfig, backend: Backend) -> None:
    """Refuse a backend without kernels for all ops, if asked to; calls its kernels cannot take fail as they come."""
    fallbacks = [op for op, native in backend.native_ops().items() if not native]
    if config.strict_ops and fallbacks and not backend.reference_is_native:
        raise BackendError(f"strict_ops: backend {backend.name} runs reference bodies for {', '.join(fallbacks)}")
    backend.strict_ops = config.strict_ops


def _named(progress: LoadProgress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
