# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of the drafter's loss, forward and backward, against a plain implementation of the same.

Each measurement has its own process, whose peak resident memory beyond inputs and weights is reported. The plain one
is left out where it would not fit into memory.

Usage: python tools/bench/losses.py [--case 2000x49152 ...] [--chunk-elements N ...] [--repeats N] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash.training.row_losses import CHUNK_ELEMENTS, DraftHead, RowObjective, row_losses, top1_token_ids

CASES = ("2000x49152", "8000x151936")
ALPHA, MAX_TERM_NATS = 0.8, 0.5
# Tensors of rows x vocabulary the plain implementation has at its peak: measured 8.1 at 500 x 49152.
PLAIN_TENSORS = 8


@dataclass(frozen=True)
class Task:
    """One measurement; `chunk_elements` None is the plain implementation."""

    num_tokens: int
    vocab_size: int
    hidden_size: int
    chunk_elements: int | None
    repeats: int
    num_threads: int


@dataclass(frozen=True)
class Result:
    """Seconds of forward and backward, MB beyond inputs and weights; None where it was left out."""

    implementation: str
    num_tokens: int
    vocab_size: int
    hidden_size: int
    chunk_elements: int | None
    median_s: float | None
    min_s: float | None
    peak_mb: float | None


class Inputs:
    """Random hidden states and an LM head, the last token of which is the mask."""

    def __init__(self, task: Task) -> None:
        torch.manual_seed(0)
        weight = torch.randn(task.vocab_size, task.hidden_size).mul_(task.hidden_size**-0.5 * 3)
        self.hidden = torch.randn(task.num_tokens, task.hidden_size).requires_grad_()
        self.target_hidden = torch.randn(task.num_tokens, task.hidden_size)
        self.head = DraftHead(weight, None, task.vocab_size - 1)
        # Labels by one chunk only: which tokens they are changes nothing here.
        label = top1_token_ids(self.target_hidden[:1], weight)
        self.labels = self.head.columns(label.expand(task.num_tokens).contiguous())


def chunked_loss(inputs: Inputs, chunk_elements: int) -> Tensor:
    """Return the sum of the row losses of this project."""
    objective = RowObjective(ALPHA, "reverse_kl", MAX_TERM_NATS, None, chunk_elements)
    return row_losses(inputs.hidden, inputs.target_hidden, inputs.labels, inputs.head, objective).loss.sum()


def plain_loss(inputs: Inputs) -> Tensor:
    """Return the same by whole tensors and autograd."""
    logits = inputs.hidden @ inputs.head.weight.T
    target_logits = inputs.target_hidden @ inputs.head.weight.T
    for each in (logits, target_logits):
        each[:, inputs.head.mask_column] = -1e4
    log_p, log_q = logits.log_softmax(-1), target_logits.log_softmax(-1)
    cross_entropy = F.nll_loss(log_p, inputs.labels, reduction="none")
    divergence = (log_p.exp() * (log_p - log_q)).clamp(max=MAX_TERM_NATS).sum(-1)
    return (ALPHA * cross_entropy + (1 - ALPHA) * divergence).sum()


def measure(task: Task) -> Result:
    """Time one implementation; run in a process of its own."""
    torch.set_num_threads(task.num_threads)
    inputs = Inputs(task)
    chunk_elements = task.chunk_elements

    def loss() -> Tensor:
        return plain_loss(inputs) if chunk_elements is None else chunked_loss(inputs, chunk_elements)

    before, times = peak_rss_mb(), []
    for _ in range(task.repeats):
        inputs.hidden.grad = None
        started = time.perf_counter()
        loss().backward()  # type: ignore[no-untyped-call]
        times.append(time.perf_counter() - started)
    peak = peak_rss_mb() - before
    return make_result(task, statistics.median(times), min(times), peak)


def make_result(task: Task, median_s: float | None, min_s: float | None, peak_mb: float | None) -> Result:
    """Return the result of a task."""
    name = "plain" if task.chunk_elements is None else "chunked"
    shape = (task.num_tokens, task.vocab_size, task.hidden_size)
    return Result(name, *shape, task.chunk_elements, median_s, min_s, peak_mb)


def peak_rss_mb() -> float:
    """Return the largest resident size so far, in MB of 10^6 bytes (Linux reports kB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def available_bytes() -> int:
    """Return what the machine can still give (Linux)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def run(task: Task, call: Callable[[Task], Result] = measure) -> Result:
    """Measure in a fresh process, or not at all when memory does not suffice."""
    needed = PLAIN_TENSORS * 4 * task.num_tokens * task.vocab_size
    if task.chunk_elements is None and needed > available_bytes():
        return make_result(task, None, None, None)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(call, (task,))


def print_result(result: Result) -> None:
    """Print one row of the table."""
    chunk = "-" if result.chunk_elements is None else f"{result.chunk_elements / 2**20:g} Mi"
    shape = f"{result.num_tokens:6d} x {result.vocab_size:6d} {result.hidden_size:6d}"
    shape = f"{shape}  {result.implementation:8s} {chunk:>7s}"
    if result.median_s is None or result.min_s is None or result.peak_mb is None:
        needed = PLAIN_TENSORS * 4 * result.num_tokens * result.vocab_size / 1e9
        print(f"{shape}  left out: needs about {needed:.0f} GB", flush=True)
    else:
        print(f"{shape}  {result.median_s:9.2f} {result.min_s:9.2f} {result.peak_mb:9.0f}", flush=True)


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="time and peak memory of the drafter's loss, forward and backward")
    parser.add_argument("--case", action="append", help=f"TOKENSxVOCABULARY; default: {' '.join(CASES)}")
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--chunk-elements", action="append", type=int, help=f"default: {CHUNK_ELEMENTS}")
    parser.add_argument("--implementation", choices=("plain", "chunked", "both"), default="both")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=Path("losses.json"), help="JSON file; default: losses.json")
    return parser.parse_args()


def main() -> None:
    """Run the chosen cases and report."""
    args = parse_args()
    chunks: list[int | None] = []
    if args.implementation != "plain":
        chunks += args.chunk_elements or [CHUNK_ELEMENTS]
    if args.implementation != "chunked":
        chunks.append(None)
    print("tokens x vocabulary hidden  loss       chunk   median s     min s   peak MB")
    results = []
    for case in args.case or CASES:
        num_tokens, vocab_size = map(int, case.split("x"))
        for chunk in chunks:
            results.append(run(Task(num_tokens, vocab_size, args.hidden_size, chunk, args.repeats, args.threads)))
            print_result(results[-1])
    environment = {"torch": torch.__version__, "machine": platform.machine(), "threads": args.threads}
    args.output.write_text(json.dumps({"environment": environment, "results": [asdict(r) for r in results]}, indent=1))


if __name__ == "__main__":
    main()
