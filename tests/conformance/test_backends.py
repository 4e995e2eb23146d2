# SPDX-License-Identifier: Apache-2.0
"""Which backends are installed, and what each runs natively."""

from __future__ import annotations

import pytest
import torch

from adaflash.errors import BackendError
from adaflash.ops.backend import OPS, Backend
from adaflash.ops.registry import installed_backends, load_backend

# Ops each backend promises to run natively; an op that silently falls back to the reference fails here.
NATIVE_OPS = {"cpu": {"paged_attention", "rms_norm", "apply_rope", "silu_and_mul", "write_kv"}, "npu": set(OPS)}


def test_every_expected_backend_is_installed(expected_backends):
    missing = sorted(set(expected_backends) - set(installed_backends()))
    assert not missing, f"{missing} of {len(expected_backends)} expected backends are not installed"


def test_a_backend_bears_the_name_it_is_installed_under(backend):
    assert installed_backends()[backend.name].load() is type(backend)


def test_promised_native_ops_override_the_reference(backend):
    native = {op for op, is_native in backend.native_ops().items() if is_native}
    assert native >= NATIVE_OPS.get(backend.name, set())
    assert set(backend.native_ops()) == set(OPS)


def test_the_reference_overrides_nothing():
    assert not any(Backend().native_ops().values())


def test_memory_info_reports_bytes(backend):
    info = backend.memory_info()
    assert 0 < info.free_bytes <= info.total_bytes


def test_preferred_dtype_is_a_floating_dtype(backend):
    assert backend.preferred_dtype(torch.bfloat16).is_floating_point


def test_an_unknown_device_names_what_is_installed():
    with pytest.raises(BackendError, match=r"device='cpux'.*cpu"):
        load_backend("cpux")


def test_auto_takes_an_installed_backend():
    assert load_backend("auto").name in installed_backends()
