# SPDX-License-Identifier: Apache-2.0
"""Times the linears of a small model's forward on the CPU, three ways in turn: PyTorch, oneDNN's packed, compiled.

Weights are larger than the CPU's caches, as in a forward. Run it on an idle machine.

Usage: python tools/bench/linears.py [--threads N ...] [--rows N ...] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash.cli.environment import environment
from adaflash.cli.json_report import write_json
from adaflash.ops.cpu_linear import compiled_linear

# (outputs, inputs) of the linears of a layer of SmolLM2-135M, and of its LM head.
LAYER, NUM_LAYERS = ((960, 576), (576, 576), (3072, 576), (576, 1536)), 30
HEAD = (49152, 576)
PACKED_ROWS = 32  # oneDNN's hint


@dataclass(frozen=True)
class Timing:
    """Milliseconds of all linears of a kind for some rows: medians, by the way they are computed."""

    kind: str
    num_threads: int
    num_rows: int
    milliseconds: dict[str, float]


def ways(weights: Sequence[Tensor]) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """Return every way to multiply by each of the weights."""
    packed = [torch.ops.mkldnn._reorder_linear_weight.default(weight, PACKED_ROWS) for weight in weights]
    pointwise = torch.ops.mkldnn._linear_pointwise.default
    compiled = [compiled_linear(weight, None) for weight in weights]
    assert None not in compiled, "the kernel takes these shapes"
    return {
        "F.linear": [lambda x, weight=weight: F.linear(x, weight) for weight in weights],  # type: ignore[misc]
        "oneDNN packed": [lambda x, w=w: pointwise(x, w, None, "none", [], "") for w in packed],  # type: ignore[misc]
        "compiled": compiled,  # type: ignore[dict-item]
    }


def measure(kind: str, weights: Sequence[Tensor], args: argparse.Namespace) -> list[Timing]:
    """Time every number of threads and rows."""
    timings = []
    every_way = ways(weights)
    for num_threads in args.threads:
        torch.set_num_threads(num_threads)
        for num_rows in args.rows:
            inputs = {depth: torch.randn(num_rows, depth) for depth in {weight.shape[1] for weight in weights}}
            seconds: dict[str, list[float]] = {name: [] for name in every_way}
            for _ in range(args.rounds + 1):
                for name, linears in every_way.items():
                    started = time.perf_counter()
                    for linear, weight in zip(linears, weights, strict=True):
                        linear(inputs[weight.shape[1]])
                    seconds[name].append(time.perf_counter() - started)
            medians = {name: 1e3 * statistics.median(values[1:]) for name, values in seconds.items()}
            timings.append(Timing(kind, num_threads, num_rows, medians))
            shown = "  ".join(f"{name} {value:7.1f} ms" for name, value in medians.items())
            gain = medians["oneDNN packed"] / medians["compiled"]
            print(f"{kind:10s} {num_threads:2d} threads {num_rows:4d} rows  {shown}  {gain:.2f}x of oneDNN", flush=True)
    return timings


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 32, 64, 256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="write the timings here; - for stdout")
    args = parser.parse_args()
    timings = []
    with torch.inference_mode():
        layers = [torch.randn(shape) for _ in range(NUM_LAYERS) for shape in LAYER]
        timings += measure("30 layers", layers, args)
        timings += measure("LM head", [torch.randn(HEAD)], args)
    if args.json is not None:
        write_json({"timings": [asdict(timing) for timing in timings], "environment": environment()}, args.json)


if __name__ == "__main__":
    main()
