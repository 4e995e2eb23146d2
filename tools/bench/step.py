# SPDX-License-Identifier: Apache-2.0
"""Host time of one engine step without the models' math: scheduling, packing, sampling rows, acceptance, commit.

Target and drafter return prepared tensors of a tiny vocabulary; everything else of the engine is real, so what is
left is what Python and small tensor calls cost per step. `right` drafts are all accepted, `wrong` ones never.

Usage: python tools/bench/step.py [--num-seqs 1,32,128] [--steps N] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from adaflash.cache.kv_cache import KVCache
from adaflash.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.engine.loading import assemble
from adaflash.models.base import ModelConfig, RopeConfig, TargetModel, TargetOutput
from adaflash.ops.backend import Backend, LinearFn
from adaflash.ops.metadata import AttentionMetadata, PackedBatch, SamplingMetadata
from adaflash.ops.registry import load_backend
from adaflash.request import SamplingParams
from adaflash.speculative.base import BlockStates, DraftBlock, Drafter

VOCAB, HIDDEN, DRAFT_BLOCK_SIZE = 64, 8, 8
RIGHT_TOKEN, WRONG_TOKEN = 5, 6
PROMPT_LEN, MAX_MODEL_LEN, KV_BLOCK = 64, 2048, 16


class FreeTarget(TargetModel):
    """Answers `RIGHT_TOKEN` everywhere, at no cost."""

    def __init__(self, backend: Backend) -> None:
        rope = RopeConfig(10000.0, 2, "default", {})
        self.config = ModelConfig(
            architecture="FreeTarget",
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=HIDDEN,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            rms_norm_eps=1e-5,
            rope=rope,
            max_position_embeddings=MAX_MODEL_LEN,
            tie_word_embeddings=True,
            attention_bias=False,
            mlp_bias=False,
            qk_norm=False,
            layer_windows=(None,),
            eos_token_ids=(),
            dtype=torch.float32,
        )
        self.backend = backend
        self.dtype = torch.float32
        self._hidden = torch.zeros(1 << 16, HIDDEN)
        self._logits = torch.zeros(1 << 12, VOCAB)
        self._logits[:, RIGHT_TOKEN] = 1.0

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        meta: AttentionMetadata,
        kv_: KVCache,
        tap_layer_ids: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Return a view of zeros."""
        hidden = self._hidden[: len(token_ids)]
        return TargetOutput(hidden, hidden if tap_layer_ids else None)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return a view of zeros."""
        return self._hidden[: len(token_ids)]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return a view of the prepared logits."""
        return self._logits[: len(hidden)]

    def reduced_head(self, token_ids: Tensor) -> LinearFn:
        """Nothing here has a head of its own."""
        raise AssertionError("the free drafter does not use the target's head")

    def pack(self) -> None:
        """Do nothing: there are no weights."""


class FreeDrafter(Drafter):
    """Proposes one token everywhere, at no cost."""

    def __init__(self, token_id: int) -> None:
        self.version = 0
        self.draft_block_size = DRAFT_BLOCK_SIZE
        self.mask_token_id = 0
        self.tap_layer_ids = (0,)
        self.max_position_embeddings = MAX_MODEL_LEN
        self.num_layers = self.num_kv_heads = 1
        self.head_dim = 2
        self.column_token_ids = None
        self.length_head = None
        max_seqs, num_drafts = 1024, DRAFT_BLOCK_SIZE - 1
        self._token_ids = torch.full((max_seqs, num_drafts), token_id)
        self._confidence = torch.full((max_seqs, num_drafts), 0.99)
        self._hidden = torch.zeros(max_seqs, DRAFT_BLOCK_SIZE, HIDDEN)

    def write_context(self, taps: Tensor, positions: Tensor, slot_mapping: Tensor, kv_: KVCache) -> None:
        """Do nothing."""

    def block_states(self, batch: PackedBatch, kv_: KVCache) -> BlockStates:
        """Return views of prepared tensors."""
        num_seqs = len(batch.token_ids) // DRAFT_BLOCK_SIZE
        hidden, confidence = self._hidden[:num_seqs], self._confidence[:num_seqs]
        return BlockStates(hidden, hidden[:, 1:], confidence, None)

    def choose(self, states: BlockStates, sampling: SamplingMetadata, keep_logits: bool = False) -> DraftBlock:
        """Return the prepared token."""
        token_ids = self._token_ids[: len(states.confidence)]
        return DraftBlock(token_ids, None, states.confidence, None, states.hidden)

    def take_weights(self, other: Drafter) -> None:
        """Refuse: there are no weights."""
        raise AssertionError("the free drafter has one version")


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of wall-clock time per decode step, median and 95th percentile, and tokens it emitted."""

    case: str
    num_seqs: int
    median_ms: float
    p95_ms: float
    tokens_per_step: float
    host_us_per_token: float


def build_engine(num_seqs: int, draft_token_id: int | None, temperature: float) -> Engine:
    """Return an engine of free models with `num_seqs` requests in decode."""
    backend = load_backend("cpu")
    drafter = None if draft_token_id is None else FreeDrafter(draft_token_id)
    config = EngineConfig(
        device="cpu",
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(2048, num_seqs * DRAFT_BLOCK_SIZE),
        max_model_len=MAX_MODEL_LEN,
        block_size=KV_BLOCK,
        num_kv_blocks=num_seqs * (MAX_MODEL_LEN // KV_BLOCK + 1),
        enable_prefix_caching=False,
        verify_policy="off" if drafter is None else "confidence",
    )
    loaded = assemble(config, backend, FreeTarget(backend), drafter, None, ("free target", "free drafter"))
    engine = Engine(config, loaded=loaded)
    params = SamplingParams(temperature=temperature, max_tokens=MAX_MODEL_LEN - PROMPT_LEN, ignore_eos=True)
    for index in range(num_seqs):
        engine.add_request([(index + position) % VOCAB for position in range(PROMPT_LEN)], params)
    while engine.stats().num_output_tokens < num_seqs:
        engine.step()
    return engine


def measure(case: str, num_seqs: int, draft_token_id: int | None, temperature: float, num_steps: int) -> StepCost:
    """Time decode steps of one case."""
    engine = build_engine(num_seqs, draft_token_id, temperature)
    for _ in range(5):
        engine.step()
    before, times = engine.stats().num_output_tokens, []
    for _ in range(num_steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    num_tokens = engine.stats().num_output_tokens - before
    median = statistics.median(times)
    return StepCost(
        case,
        num_seqs,
        median * 1e3,
        sorted(times)[int(0.95 * len(times))] * 1e3,
        num_tokens / num_steps,
        median * 1e6 * num_steps / num_tokens,
    )


def main() -> None:
    """Measure and print every case."""
    parser = argparse.ArgumentParser(description="host time per engine step, without the models' math")
    parser.add_argument("--num-seqs", default="1,32,128")
    parser.add_argument("--steps", type=int, default=100, help=f"at most {(MAX_MODEL_LEN - PROMPT_LEN) // 8 - 8}")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    costs = []
    for num_seqs in map(int, args.num_seqs.split(",")):
        for case, token_id, temperature in (
            ("off", None, 0.0),
            ("off, sampled", None, 1.0),
            ("drafts wrong", WRONG_TOKEN, 0.0),
            ("drafts right", RIGHT_TOKEN, 0.0),
            ("drafts, sampled", RIGHT_TOKEN, 1.0),
        ):
            cost = measure(case, num_seqs, token_id, temperature, args.steps)
            costs.append(cost)
            if not args.json:
                times = f"median={cost.median_ms:7.3f} ms p95={cost.p95_ms:7.3f} ms"
                tokens = f"tokens/step={cost.tokens_per_step:7.1f} host={cost.host_us_per_token:7.1f} us/token"
                print(f"{cost.case:16s} seqs={cost.num_seqs:4d} {times} {tokens}", flush=True)
    if args.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))


if __name__ == "__main__":
    main()
