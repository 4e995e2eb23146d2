# SPDX-License-Identifier: Apache-2.0
"""Random numbers: a CPU generator that follows the seed and the offset of an NPU generator."""

from __future__ import annotations

import hashlib
import threading

import torch

from npu_emulator import runtime

_lock = threading.Lock()
_STEP = 4  # what an operator takes of the offset at least, as Philox generators count


def _default_generator(device: torch.device) -> torch.Generator:
    generators = runtime.npu().default_generators
    generator: torch.Generator = generators[device.index or 0]
    return generator


def host_generator(device: torch.device, generator: torch.Generator | None) -> torch.Generator:
    """A CPU generator for one operator; the NPU generator (the device's own, if None) moves on by one step.

    The same seed and the same calls before give the same numbers, but not those of a device or of the CPU.
    """
    source = _default_generator(device) if generator is None else generator
    with _lock:
        state = source.get_state()
        seed, offset = state.view(torch.int64).tolist()[:2]
        state.view(torch.int64)[1] = offset + _STEP
        source.set_state(state)
    digest = hashlib.blake2b(f"{seed} {offset}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
