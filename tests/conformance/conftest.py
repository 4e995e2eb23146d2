# SPDX-License-Identifier: Apache-2.0
"""Backends under test, the one tolerance table, and paged sequences that know nothing of a backend's KV layout."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from adaflash.errors import BackendError
from adaflash.ops.backend import Backend
from adaflash.ops.metadata import PackedBatch
from adaflash.ops.registry import installed_backends, load_backend

# Backends that run wherever this suite does: one that is missing, or that cannot be loaded, fails it. Other installed
# backends are tested where their device is; elsewhere their tests are skipped, and say what is missing.
EXPECTED_BACKENDS = ("cpu",)

# What a backend's kernels take where not everything: cases have these shapes unless a test is about others.
HEAD_DIM = {"npu": 128}
BLOCK_SIZES = {"npu": (128,)}

# (rtol, atol): fp32 differs by the order of sums; bf16 by one rounding of inputs of magnitude up to about 4.
TOLERANCES = {torch.float32: (1e-5, 2e-5), torch.bfloat16: (1.6e-2, 1.6e-2)}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --device, which `make test-device` uses, and what an emulated device may be told to take."""
    parser.addoption("--device", metavar="NAME", help="test this backend only; fails at once when it cannot be loaded")
    parser.addoption(
        "--fp32-attention", action="store_true", help="npu: let the attention kernel have fp32, which CANN's refuses"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the tests of the backend that --device names."""
    device = config.getoption("--device", default=None)
    if device is None:
        return
    try:
        load_backend(device)
    except BackendError as error:
        raise pytest.UsageError(f"--device: {error}") from error
    others = [item for item in items if isinstance(item, pytest.Function) and _backend_of(item) != device]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def _backend_of(item: pytest.Function) -> object:
    return item.callspec.params.get("backend") if hasattr(item, "callspec") else None


@pytest.fixture(scope="session", params=sorted({*EXPECTED_BACKENDS, *installed_backends()}))
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each installed backend in turn."""
    try:
        loaded = load_backend(request.param)
    except BackendError as error:
        if request.param in EXPECTED_BACKENDS:
            raise
        pytest.skip(f"backend {request.param} cannot run here: {error}")
    if request.param == "npu" and request.config.getoption("--fp32-attention"):
        return type(loaded)(attention_dtypes=TOLERANCES)
    return loaded


@pytest.fixture
def strict(backend: Backend) -> Iterator[None]:
    """Make any fallback in a test an error."""
    backend.strict_ops = True
    yield
    backend.strict_ops = False


@pytest.fixture(scope="session")
def reference(backend: Backend) -> Backend:
    """The reference bodies on the device of `backend`."""
    return Backend(backend.device)


@pytest.fixture(scope="session")
def expected_backends() -> tuple[str, ...]:
    """Names that must be installed."""
    return EXPECTED_BACKENDS


@pytest.fixture(params=list(TOLERANCES), ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each dtype of the tolerance table."""
    each: torch.dtype = request.param
    return each


@pytest.fixture(scope="session")
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """Compare with the tolerance of the actual tensor's dtype; also asserts equal shapes and dtypes."""

    def compare(actual: Tensor, expected: Tensor) -> None:
        rtol, atol = TOLERANCES[actual.dtype]
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)

    return compare


@dataclass(frozen=True)
class Heads:
    """Attention shape: `num_q_heads` [T, Hq, D] over `num_kv_heads` [T, Hkv, D]."""

    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64


@dataclass(frozen=True)
class PagedCase:
    """Sequences of random keys and values, and where a pool keeps them.

    Attributes:
        keys: Per sequence [seq_len, Hkv, D]; `values` likewise.
        q: [T + padding, Hq, D]; rows after the packed queries belong to no sequence.
    """

    heads: Heads
    block_size: int
    num_blocks: int
    query_lens: list[int]
    seq_lens: list[int]
    block_tables: list[list[int]]
    keys: list[Tensor]
    values: list[Tensor]
    q: Tensor

    @property
    def num_queries(self) -> int:
        """Packed rows without padding."""
        return sum(self.query_lens)

    def slots(self, sequence: int, device: torch.device) -> Tensor:
        """Slot of every key of a sequence, [seq_len] int64."""
        table = torch.tensor(self.block_tables[sequence] or [0], device=device)
        positions = torch.arange(self.seq_lens[sequence], device=device)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    def batch(self, device: torch.device) -> PackedBatch:
        """The step's lengths; tokens and slots are not attention's business and are empty."""
        unused = torch.empty(0, dtype=torch.int64, device=device)
        width = max([len(table) for table in self.block_tables], default=0)
        padded = [table + [0] * (width - len(table)) for table in self.block_tables]
        cu_seqlens_q = torch.tensor([0, *self.query_lens], device=device).cumsum(0).int()
        seq_lens = torch.tensor(self.seq_lens, dtype=torch.int32, device=device)
        tables = torch.tensor(padded, dtype=torch.int32, device=device).view(len(padded), width)
        host = (list(self.query_lens), list(self.seq_lens), [list(table) for table in self.block_tables])
        return PackedBatch(unused, unused, unused, cu_seqlens_q, seq_lens, tables, unused, *host)

    def caches(self, backend: Backend) -> tuple[Tensor, Tensor]:
        """Caches of the backend's layout holding the sequences; every slot of no key is NaN."""
        num_kv_heads, head_dim = self.heads.num_kv_heads, self.heads.head_dim
        shape = backend.kv_cache_shape(self.num_blocks, self.block_size, num_kv_heads, head_dim)
        k_cache, v_cache = (
            torch.full(shape, float("nan"), dtype=self.q.dtype, device=backend.device) for _ in range(2)
        )
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            slots = self.slots(i, backend.device)
            backend.write_kv(keys.to(backend.device), values.to(backend.device), k_cache, v_cache, slots)
        return k_cache, v_cache

    def attend(self, backend: Backend, causal: bool = True, window: int | None = None) -> Tensor:
        """Write the sequences and attend them, [T, Hq, D]; padding rows, which are undefined, are cut off."""
        k_cache, v_cache = self.caches(backend)
        meta = backend.attention_metadata(self.batch(backend.device))
        q, scale = self.q.to(backend.device), self.heads.head_dim**-0.5
        out = backend.paged_attention(q, k_cache, v_cache, meta, scale, causal, window)
        assert out.shape == q.shape, "one output row per packed row"
        return out[: self.num_queries]


def build_paged_case(
    query_lens: list[int],
    seq_lens: list[int],
    heads: Heads,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    shuffled: bool = True,
    padding_rows: int = 0,
    seed: int = 0,
) -> PagedCase:
    """Lay sequences out in a pool, in scattered blocks or in consecutive ones."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(needed) + 3
    free = list(range(num_blocks))
    if shuffled:
        random.Random(seed).shuffle(free)
    tables = [[free.pop(0) for _ in range(count)] for count in needed]

    def normal(rows: int, num_heads: int) -> Tensor:
        return torch.randn(rows, num_heads, heads.head_dim, generator=generator).to(dtype)

    keys, values = ([normal(seq_len, heads.num_kv_heads) for seq_len in seq_lens] for _ in range(2))
    q = normal(sum(query_lens) + padding_rows, heads.num_q_heads)
    return PagedCase(heads, block_size, num_blocks, query_lens, seq_lens, tables, keys, values, q)


@pytest.fixture(scope="session")
def heads(backend: Backend) -> Callable[..., Heads]:
    """`Heads`, the attention shape of a case, with a head_dim that the backend's kernels take."""
    return partial(Heads, head_dim=HEAD_DIM.get(backend.name, 64))


@pytest.fixture(scope="session")
def block_sizes(backend: Backend) -> tuple[int, ...]:
    """KV block sizes that the backend takes."""
    return BLOCK_SIZES.get(backend.name, (8, 16, 32))


@pytest.fixture(scope="session")
def paged_case(backend: Backend, heads: Callable[..., Heads]) -> Callable[..., PagedCase]:
    """`build_paged_case`, by default with a shape that the backend's kernels take."""

    def build(query_lens: list[int], seq_lens: list[int], **other: object) -> PagedCase:
        shape = {"heads": heads(), "block_size": backend.preferred_block_size}
        return build_paged_case(query_lens, seq_lens, **shape | other)

    return build
