# SPDX-License-Identifier: Apache-2.0
"""Counts of what a process does on its devices: operators, copies, host waits, replays."""

from __future__ import annotations

import ctypes
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from npu_emulator import runtime

_KINDS = ("op", "host_to_device", "device_to_host", "device_to_device", "sync", "replay")
_OP, _H2D, _D2H, _, _SYNC, _REPLAY = range(6)


class _CEvent(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("stream", ctypes.c_int32), ("bytes", ctypes.c_uint64))


@dataclass(frozen=True)
class Transfers:
    """Copies in one direction."""

    count: int
    bytes: int


_NONE = Transfers(0, 0)


class Event(NamedTuple):
    """One thing that happened on a device.

    Attributes:
        kind: op, host_to_device, device_to_host, device_to_device, sync or replay.
        name: The operator's schema name, empty for the other kinds.
        bytes: Of a copy.
        stream: The stream's number; 0 where none is known.
    """

    kind: str
    name: str
    bytes: int
    stream: int


@dataclass
class Recording:
    """What happened while it was recorded; filled when the recording ends.

    Attributes:
        ops: Calls of operators by schema name, those that were captured included, those of replays not.
        launches: Calls of operators outside of captures and replays, each a kernel launched by the host.
        host_to_device, device_to_host: Copies and their bytes.
        syncs: How often the host waited for a device.
        replays: Graphs replayed.
        events: All of it in order.
    """

    ops: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    host_to_device: Transfers = _NONE
    device_to_host: Transfers = _NONE
    syncs: int = 0
    replays: int = 0
    events: list[Event] = field(default_factory=list)


_library = runtime.library()
_counters = ((ctypes.c_uint64 * 2) * len(_KINDS)).in_dll(_library, "npu_emulator_counters")
_library.npu_emulator_trace_op.argtypes = [ctypes.c_uint64, ctypes.c_int]
_library.npu_emulator_record.restype = ctypes.c_size_t
_library.npu_emulator_read_events.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]

_lock = threading.Lock()
_ops: Counter[str] = Counter()
_launches = 0
_names: list[str] = []
_numbers: dict[str, int] = {}


def count_op(name: str, captured: bool) -> None:
    """Note one call of an operator."""
    global _launches
    with _lock:
        _ops[name] += 1
        _launches += not captured
        number = _numbers.setdefault(name, len(_names))
        if number == len(_names):
            _names.append(name)
    _library.npu_emulator_trace_op(number, 0)


def _transfers(kind: int) -> Transfers:
    return Transfers(*_counters[kind])


def totals() -> Recording:
    """What the process did until now, without the events."""
    with _lock:
        ops, launches = Counter(_ops), _launches
    return Recording(ops, launches, _transfers(_H2D), _transfers(_D2H), _counters[_SYNC][0], _counters[_REPLAY][0])


def _difference(after: Recording, before: Recording) -> Recording:
    def copies(name: str) -> Transfers:
        late, early = getattr(after, name), getattr(before, name)
        return Transfers(late.count - early.count, late.bytes - early.bytes)

    return Recording(
        after.ops - before.ops,
        after.launches - before.launches,
        copies("host_to_device"),
        copies("device_to_host"),
        after.syncs - before.syncs,
        after.replays - before.replays,
    )


def _read_events(first: int, last: int) -> list[Event]:
    raw = (_CEvent * (last - first))()
    _library.npu_emulator_read_events(first, last - first, raw)
    return [
        Event(_KINDS[event.kind], _names[event.bytes], 0, event.stream)
        if event.kind == _OP
        else Event(_KINDS[event.kind], "", event.bytes, event.stream)
        for event in raw
    ]


@contextmanager
def record() -> Iterator[Recording]:
    """Record what all threads of this process do on its devices; the object is filled at the end of the block."""
    recording = Recording()
    first, before = _library.npu_emulator_record(1), totals()
    try:
        yield recording
    finally:
        last = _library.npu_emulator_record(-1)
        vars(recording).update(vars(_difference(totals(), before)))
        recording.events = _read_events(first, last)
        _library.npu_emulator_clear_events()


def write(path: Path) -> None:
    """Write the process's totals as JSON."""
    total = totals()
    content = {
        "ops": dict(sorted(total.ops.items())),
        "launches": total.launches,
        "host_to_device": asdict(total.host_to_device),
        "device_to_host": asdict(total.device_to_host),
        "syncs": total.syncs,
        "replays": total.replays,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
