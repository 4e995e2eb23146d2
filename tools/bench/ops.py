# SPDX-License-Identifier: Apache-2.0
"""Times each op of the installed backends against the reference, interleaved, on the shapes of SmolLM2-135M.

Usage: python tools/bench/ops.py [--backend NAME ...] [--op NAME ...] [--repeats N] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from adaflash.ops.backend import Backend
from adaflash.ops.metadata import PackedBatch
from adaflash.ops.registry import installed_backends, load_backend

HIDDEN, INTERMEDIATE, VOCAB, Q_HEADS, KV_HEADS, HEAD_DIM = 576, 1536, 49152, 9, 3, 64
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
LINEARS = {
    "qkv": (HIDDEN, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM),
    "o": (Q_HEADS * HEAD_DIM, HIDDEN),
    "gate_up": (HIDDEN, 2 * INTERMEDIATE),
    "down": (INTERMEDIATE, HIDDEN),
    "lm_head": (HIDDEN, VOCAB),
}
# num_seqs, query_len (0: ragged, 1 to 8), seq_len, whether blocks are scattered
ATTENTION = [(s, q, k, s > 1) for s in (1, 8, 32) for q in (1, 4, 8, 0) for k in (64, 256, 1024)]
# Enough weights or caches of one shape that they are not served from the CPU's caches, as in a forward.
WORKING_SET_BYTES = 48 << 20
MIN_REPEATS, CASE_SECONDS = 3, 0.4

Call = Callable[[int], object]


@dataclass(frozen=True)
class Case:
    """One op on one shape; `prepare(backend)` returns a call that takes a counter and varies its data by it."""

    op: str
    shape: str
    prepare: Callable[[Backend], Call]


@dataclass(frozen=True)
class Timing:
    """Median and minimum of both sides in microseconds."""

    backend: str
    op: str
    shape: str
    reference_us: float
    reference_min_us: float
    backend_us: float
    backend_min_us: float

    @property
    def speedup(self) -> float:
        """Ratio of minima, which a busy machine distorts least."""
        return self.reference_min_us / self.backend_min_us


def linear_cases() -> Iterator[Case]:
    """Every linear of the model; the reference is F.linear."""
    for name, (num_inputs, num_outputs) in LINEARS.items():
        copies = max(1, min(16, WORKING_SET_BYTES // (4 * num_inputs * num_outputs)))
        for rows in ROWS[:-1] if name == "lm_head" else ROWS:

            def prepare(
                backend: Backend, ins: int = num_inputs, outs: int = num_outputs, copies: int = copies, rows: int = rows
            ) -> Call:
                x = torch.randn(rows, ins, device=backend.device)
                weights = (torch.randn(outs, ins, device=backend.device) for _ in range(copies))
                linears = [backend.pack_linear(weight, None) for weight in weights]
                return lambda i: linears[i % copies](x)

            yield Case("pack_linear", f"{name} rows={rows}", prepare)


def layer_cases() -> Iterator[Case]:
    """The ops between linears and attention."""
    for rows in (1, 8, 32, 128, 512):

        def norm(backend: Backend, rows: int = rows) -> Call:
            x, residual = torch.randn(2, rows, HIDDEN, device=backend.device)
            weight = torch.randn(HIDDEN, device=backend.device)
            return lambda _: backend.rms_norm(x, weight, 1e-5, residual)

        def rope(backend: Backend, rows: int = rows) -> Call:
            q, k, _ = projected(backend, rows)
            cos, sin = torch.randn(2, rows, HEAD_DIM // 2, device=backend.device)
            return lambda _: backend.apply_rope(q, k, cos, sin)

        def silu(backend: Backend, rows: int = rows) -> Call:
            gate_up = torch.randn(rows, 2 * INTERMEDIATE, device=backend.device)
            return lambda _: backend.silu_and_mul(gate_up)

        def write(backend: Backend, rows: int = rows) -> Call:
            _, k, v = projected(backend, rows)
            shape = backend.kv_cache_shape(128, backend.preferred_block_size, KV_HEADS, HEAD_DIM)
            k_cache, v_cache = torch.zeros(2, *shape, device=backend.device)
            slots = torch.randperm(128 * backend.preferred_block_size)[:rows].to(backend.device)
            return lambda _: backend.write_kv(k, v, k_cache, v_cache, slots)

        for op, prepare in {"rms_norm": norm, "apply_rope": rope, "silu_and_mul": silu, "write_kv": write}.items():
            yield Case(op, f"rows={rows}", prepare)


def projected(backend: Backend, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as a merged projection leaves them, views of [rows, (Hq + 2 Hkv) * D]."""
    merged = torch.randn(rows, Q_HEADS + 2 * KV_HEADS, HEAD_DIM, device=backend.device)
    q, k, v = merged.split_with_sizes((Q_HEADS, KV_HEADS, KV_HEADS), dim=1)
    return q, k, v


def attention_cases() -> Iterator[Case]:
    """Decode and verify, causal; 0 queries stands for 1 to 8 of them, mixed."""
    for num_seqs, query_len, seq_len, scattered in ATTENTION:

        def prepare(
            backend: Backend, s: int = num_seqs, q: int = query_len, k: int = seq_len, scattered: bool = scattered
        ) -> Call:
            return prepare_attention(
                backend, [q or 1 + i % 8 for i in range(s)], [k - i % 16 for i in range(s)], scattered
            )

        queries = query_len or "1..8"
        yield Case("paged_attention", f"seqs={num_seqs} queries={queries} keys={seq_len}", prepare)


def prepare_attention(backend: Backend, query_lens: list[int], seq_lens: list[int], scattered: bool) -> Call:
    """Return the attention of one layer; layers share the metadata of a step, as in a forward."""
    block_size = backend.preferred_block_size
    needed = [-(-seq_len // block_size) for seq_len in seq_lens]
    free = list(range(sum(needed)))
    if scattered:
        random.Random(0).shuffle(free)
    tables = [[free.pop(0) for _ in range(count)] for count in needed]
    shape = backend.kv_cache_shape(sum(needed), block_size, KV_HEADS, HEAD_DIM)
    num_layers = max(2, min(8, WORKING_SET_BYTES // (8 * sum(seq_lens) * KV_HEADS * HEAD_DIM)))
    k_caches, v_caches = ([torch.randn(shape, device=backend.device) for _ in range(num_layers)] for _ in range(2))
    q = torch.randn(sum(query_lens), Q_HEADS, HEAD_DIM, device=backend.device)
    meta = backend.attention_metadata(packed_batch(query_lens, seq_lens, tables, backend.device))
    scale = HEAD_DIM**-0.5

    def attend(i: int) -> Tensor:
        return backend.paged_attention(q, k_caches[i % num_layers], v_caches[i % num_layers], meta, scale, True)

    return attend


def packed_batch(
    query_lens: list[int], seq_lens: list[int], tables: list[list[int]], device: torch.device
) -> PackedBatch:
    """Return the lengths of a step; tokens and slots play no part in attention."""
    unused = torch.empty(0, dtype=torch.int64, device=device)
    width = max(map(len, tables))
    padded = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32, device=device)
    cu_seqlens_q = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return PackedBatch(unused, unused, unused, cu_seqlens_q, lengths, padded, unused, query_lens, seq_lens, tables)


def time_case(case: Case, backend: Backend, repeats: int) -> Timing:
    """Alternate the reference and the backend, after one untimed call each, until `repeats` or `CASE_SECONDS`."""
    calls = [case.prepare(Backend(backend.device)), case.prepare(backend)]
    samples: list[list[float]] = [[], []]
    deadline = time.perf_counter() + CASE_SECONDS
    for i in range(repeats + 1):
        if i > MIN_REPEATS and time.perf_counter() > deadline:
            break
        for call, times in zip(calls, samples, strict=True):
            synchronize(backend.device)
            start = time.perf_counter()
            call(i)
            synchronize(backend.device)
            times.append((time.perf_counter() - start) * 1e6)
    reference, native = (times[1:] for times in samples)
    return Timing(
        backend.name,
        case.op,
        case.shape,
        statistics.median(reference),
        min(reference),
        statistics.median(native),
        min(native),
    )


def synchronize(device: torch.device) -> None:
    """Wait for the device; host code is synchronous."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def environment() -> dict[str, str | int]:
    """Return what the timings depend on."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": models[0] if models else platform.processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
    }


def print_header() -> None:
    """Print the environment and the column names; times are medians and minima."""
    print(" ".join(f"{key}={value}" for key, value in environment().items()))
    print(f"{'backend':8} {'op':16} {'shape':34} {'reference us (min)':>20} {'backend us (min)':>20} {'speed-up':>9}")


def print_row(timing: Timing) -> None:
    """Print one line of the table."""
    reference = f"{timing.reference_us:.0f} ({timing.reference_min_us:.0f})"
    native = f"{timing.backend_us:.0f} ({timing.backend_min_us:.0f})"
    row = f"{timing.backend:8} {timing.op:16} {timing.shape:34} {reference:>20} {native:>20}"
    print(f"{row} {timing.speedup:8.2f}x", flush=True)


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=sorted(installed_backends()), help="default: all")
    ops = ("pack_linear", "rms_norm", "apply_rope", "silu_and_mul", "write_kv", "paged_attention")
    parser.add_argument("--op", action="append", choices=ops, help="default: all")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls per side and shape")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser.parse_args()


def main() -> None:
    """Run the chosen cases and report."""
    args = parse_args()
    cases = [case for make in (linear_cases, layer_cases, attention_cases) for case in make()]
    wanted = [case for case in cases if args.op is None or case.op in args.op]
    timings = []
    if not args.json:
        print_header()
    with torch.inference_mode():
        for name in args.backend or sorted(installed_backends()):
            backend = load_backend(name)
            for case in wanted:
                timings.append(time_case(case, backend, args.repeats))
                if not args.json:
                    print_row(timings[-1])
    if args.json:
        print(
            json.dumps({"environment": environment(), "timings": [asdict(t) | {"speedup": t.speedup} for t in timings]})
        )


if __name__ == "__main__":
    main()
