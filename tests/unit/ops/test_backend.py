# SPDX-License-Identifier: Apache-2.0
"""How a backend reports calls that its kernels cannot take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adaflash.errors import BackendError
from adaflash.ops.backend import Backend, Fallback


class EvenBackend(Backend):
    """A device whose `silu_and_mul` takes even numbers of rows only."""

    name = "even"

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.shape[0] % 2:
            self.report_fallback("silu_and_mul", "an even number of rows", f"{gate_up.shape[0]} rows")
        return super().silu_and_mul(gate_up)


def test_fallbacks_are_counted_by_reason_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    backend = EvenBackend()
    for num_rows in (1, 2, 3, 5):
        backend.silu_and_mul(torch.ones(num_rows, 4))
    assert backend.fallbacks == {Fallback("silu_and_mul", "an even number of rows"): 3}
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "backend=even op=silu_and_mul takes=an even number of rows found=1 rows" in record.message


def test_strict_ops_makes_a_fallback_an_error_that_names_op_limit_and_shape() -> None:
    backend = EvenBackend()
    backend.strict_ops = True
    backend.silu_and_mul(torch.ones(2, 4))
    with pytest.raises(
        BackendError, match="backend even runs silu_and_mul natively for an even number of rows only, found 3 rows"
    ):
        backend.silu_and_mul(torch.ones(3, 4))
    assert not backend.fallbacks


def test_backends_count_for_themselves() -> None:
    first, second = EvenBackend(), EvenBackend()
    first.silu_and_mul(torch.ones(1, 4))
    assert first.fallbacks
    assert not second.fallbacks
