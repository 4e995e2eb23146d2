# SPDX-License-Identifier: Apache-2.0
"""AdaFlash against transformers `generate`, and vLLM if given: same model, same token ids, interleaved passes.

Greedy, a fixed number of new tokens per prompt (no stop ids), prefix caching off everywhere, one system running at a
time on the same number of threads. transformers and vLLM get `batch` prompts at once, then the next ones; since all
outputs are equally long, continuous batching has no advantage here.

Usage: python tools/bench/peers.py [--batch 1,8] [--domain code] [--rounds N] [--json FILE]
       [--vllm-python VENV/bin/python [--vllm-speculative JSON]]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, GenerationMixin

from adaflash.cli.environment import environment
from adaflash.cli.measure import BenchRequest, Spread, run_pass, spread
from adaflash.config import EngineConfig
from adaflash.demo.drafter import demo_drafter_dir
from adaflash.demo.model import demo_model_dir
from adaflash.demo.prompts import demo_prompts
from adaflash.engine.engine import Engine
from adaflash.engine.tokenizer import Tokenizer
from adaflash.request import ChatMessage, SamplingParams

MAX_MODEL_LEN = 1024
POLICIES = ("off", "confidence")


class Pass(NamedTuple):
    """One system's run over all prompts."""

    seconds: float
    token_ids: list[list[int]]


System = Callable[[list[list[int]], int, int], Pass]
"""Runs (prompts, max_tokens, batch_size)."""


@dataclass(frozen=True)
class Row:
    """One system at one batch size.

    Attributes:
        against_transformers: Ratio of tokens/s in the same round.
        num_identical: Prompts whose tokens equal those of transformers at batch 1.
    """

    system: str
    batch_size: int
    tokens_per_s: Spread
    against_transformers: Spread
    num_identical: int
    num_prompts: int


class VllmSystem:
    """A vLLM engine in its own process, which sleeps while other systems are measured.

    Args:
        python: Interpreter of an environment with vLLM.
        model: Model directory.
        max_num_seqs: Largest batch.
        speculative: vLLM's `speculative_config` as JSON, or None.
    """

    def __init__(self, python: Path, model: Path, max_num_seqs: int, speculative: str | None) -> None:
        worker = Path(__file__).with_name("vllm_worker.py")
        command = [str(python), str(worker), "--model", str(model), "--max-model-len", str(MAX_MODEL_LEN)]
        command += ["--max-num-seqs", str(max_num_seqs)]
        command += ["--speculative", speculative] if speculative else []
        # Left alone, vLLM binds its threads to all cores; `nobind` makes it keep to OMP_NUM_THREADS.
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **threads}
        )
        self.version = str(self._answer()["version"])  # Sent once the model is loaded.

    def __call__(self, prompts: list[list[int]], max_tokens: int, batch_size: int) -> Pass:
        """Run one pass."""
        stdin = self._process.stdin
        assert stdin is not None, "stdin is a pipe"
        stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens, "batch_size": batch_size}) + "\n")
        stdin.flush()
        return Pass(**self._answer())

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None, "stdout is a pipe"
        for line in stdout:
            if line.startswith("RESULT "):
                answer: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return answer
            sys.stderr.write(line)  # vLLM logs to stdout.
        raise RuntimeError(f"vLLM ended with exit code {self._process.wait()}; its log is above")


def transformers_system(model: GenerationMixin, pad_token_id: int) -> System:
    """Return `generate` over static, left-padded batches."""

    @torch.inference_mode()
    def run(prompts: list[list[int]], max_tokens: int, batch_size: int) -> Pass:
        token_ids, started = [], perf_counter()
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            width = max(map(len, batch))
            ids = torch.tensor([[pad_token_id] * (width - len(prompt)) + prompt for prompt in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
            output = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=max_tokens,
                max_new_tokens=max_tokens,
                pad_token_id=pad_token_id,
                eos_token_id=None,
            )
            token_ids += output[:, width:].tolist()
        return Pass(perf_counter() - started, token_ids)

    return run


def adaflash_system(engine: Engine, policy: str) -> System:
    """Return our engine under one policy."""

    def run(prompts: list[list[int]], max_tokens: int, batch_size: int) -> Pass:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        requests = [BenchRequest(prompt, params) for prompt in prompts]
        result = run_pass(engine, policy, requests, batch_size)
        return Pass(result.seconds, result.token_ids)

    return run


def compare(
    systems: dict[str, System], prompts: list[list[int]], max_tokens: int, batch_size: int, num_rounds: int
) -> list[Row]:
    """Run every system in every round, the order reversed in every second one."""
    for run in systems.values():
        run(prompts[:batch_size], 4, batch_size)
    expected = systems["transformers"](prompts, max_tokens, 1).token_ids
    passes: dict[str, list[Pass]] = {name: [] for name in systems}
    for round_index in range(num_rounds):
        for name in list(systems)[:: 1 if round_index % 2 == 0 else -1]:
            passes[name].append(systems[name](prompts, max_tokens, batch_size))
            print(f"  round {round_index} {name} {passes[name][-1].seconds:.1f} s", flush=True)
    return [_row(name, batch_size, passes[name], passes["transformers"], expected) for name in systems]


def _row(name: str, batch_size: int, mine: list[Pass], reference: list[Pass], expected: list[list[int]]) -> Row:
    num_tokens = sum(map(len, expected))
    identical = [got == wanted for got, wanted in zip(mine[0].token_ids, expected, strict=True)]
    return Row(
        name,
        batch_size,
        spread([num_tokens / run.seconds for run in mine]),
        spread([other.seconds / run.seconds for run, other in zip(mine, reference, strict=True)]),
        sum(identical),
        len(expected),
    )


def _show(rows: Sequence[Row]) -> None:
    for row in rows:
        speed, ratio = row.tokens_per_s, row.against_transformers
        print(
            f"{row.system:24s} batch={row.batch_size:<3d} {speed.median:7.1f} tok/s ({speed.low:.1f}-{speed.high:.1f}) "
            f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f}) identical {row.num_identical}/{row.num_prompts}",
            flush=True,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="AdaFlash against transformers and vLLM")
    parser.add_argument("--model", type=Path, help="model directory (default: the demo model)")
    parser.add_argument("--draft", type=Path, help="drafter directory (default: the demo drafter)")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--domain", default="code", help="embedded prompts to use")
    parser.add_argument("--num-prompts", type=int, default=8, help="beyond the embedded ones they repeat")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="CPU threads of every system (default: torch's)")
    parser.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vLLM")
    parser.add_argument("--vllm-speculative", help="speculative_config of a second vLLM engine, as JSON")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.vllm_speculative and not args.vllm_python:
        parser.error("--vllm-speculative needs --vllm-python")
    return args


def _build_systems(args: argparse.Namespace, model_dir: Path, max_num_seqs: int) -> dict[str, System]:
    config = EngineConfig(
        model=str(model_dir),
        draft=str(args.draft or demo_drafter_dir()),
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
        num_threads=args.threads,
    )
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    engine = Engine(config)
    systems: dict[str, System] = {"transformers": transformers_system(model, engine.info.eos_token_ids[0])}
    for policy in POLICIES:
        systems[f"adaflash {policy}"] = adaflash_system(engine, policy)
    if args.vllm_python:
        for name, speculative in (("vllm", None), ("vllm speculative", args.vllm_speculative)):
            if name == "vllm" or speculative:
                vllm = VllmSystem(args.vllm_python, model_dir, max_num_seqs, speculative)
                systems[f"{name} {vllm.version}"] = vllm
    return systems


def main() -> None:
    """Measure every batch size and print one row per system."""
    args = _arguments()
    model_dir = args.model or demo_model_dir()
    batch_sizes = [int(word) for word in args.batch.split(",")]
    tokenizer = Tokenizer(model_dir)
    embedded = demo_prompts(args.domain)
    chosen = [embedded[i % len(embedded)] for i in range(args.num_prompts)]
    prompts = [tokenizer.render_chat([ChatMessage("user", prompt.prompt)]) for prompt in chosen]
    systems = _build_systems(args, model_dir, max(batch_sizes))
    rows: list[Row] = []
    for batch_size in batch_sizes:
        rows += compare(systems, prompts, args.max_tokens, batch_size, args.rounds)
    _show(rows)
    if args.json:
        report = {"rows": [asdict(row) for row in rows], "environment": environment(), "domain": args.domain}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for system in systems.values():
        if isinstance(system, VllmSystem):
            system.close()


if __name__ == "__main__":
    main()
