# SPDX-License-Identifier: Apache-2.0
"""A trajectory's features as a safetensors file in memory, without loss, and back."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt

from adaflash.errors import RequestError
from adaflash.models.strict_json import parse_json
from adaflash.rpc.pb import trainer_pb2 as pb
from adaflash.training.trajectories import FeatureArray, TrajectoryFeatures

FIELD = "features"
_ITEM_BYTES = {"F32": 4, "BF16": 2}
_ALIGNMENT = 8


def features_to_pb(features: TrajectoryFeatures) -> pb.TrajectoryFeatures:
    """Return features for the wire; as BF16, half the size, when that is what they were computed in."""
    taps, hidden = (np.ascontiguousarray(array, "<f4") for array in features)
    dtype = "BF16" if _are_bfloat16(taps) and _are_bfloat16(hidden) else "F32"
    message = pb.TrajectoryFeatures(
        dtype=dtype, num_tokens=len(taps), taps_size=taps.shape[1], hidden_size=hidden.shape[1]
    )
    header = json.dumps(_header_of(message)).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    message.safetensors = b"".join(
        [len(header).to_bytes(8, "little"), header, _to_bytes(taps, dtype), _to_bytes(hidden, dtype)]
    )
    return message


def features_from_pb(message: pb.TrajectoryFeatures) -> TrajectoryFeatures:
    """Return the features in a message, as float32.

    Raises:
        RequestError: The file is not what the message says, or a value is not finite.
    """
    if message.dtype not in _ITEM_BYTES:
        raise RequestError(f"{FIELD}.dtype", message.dtype, f"one of {', '.join(_ITEM_BYTES)}")
    expected, data = _header_of(message), message.safetensors
    header_end = 8 + int.from_bytes(data[:8], "little")
    try:
        header = parse_json(data[8:header_end])
    except ValueError as error:
        raise RequestError(f"{FIELD}.safetensors", f"{len(data)} bytes", f"a safetensors file ({error})") from error
    taps_end, end = (header_end + expected[name]["data_offsets"][1] for name in ("taps", "hidden"))
    view = memoryview(data)
    if header != expected or len(data) != end:
        allowed = f"a safetensors file of {end - header_end} bytes behind the header {expected}"
        raise RequestError(f"{FIELD}.safetensors", f"{len(data)} bytes", allowed)
    taps = _from_bytes(view[header_end:taps_end], message.dtype).reshape(message.num_tokens, message.taps_size)
    hidden = _from_bytes(view[taps_end:], message.dtype).reshape(message.num_tokens, message.hidden_size)
    if not (np.isfinite(taps).all() and np.isfinite(hidden).all()):
        raise RequestError(f"{FIELD}.safetensors", "NaN or infinity", "finite everywhere")
    return TrajectoryFeatures(taps, hidden)


def _header_of(message: pb.TrajectoryFeatures) -> dict[str, dict[str, list[int]]]:
    header, begin = {}, 0
    for name, size in (("taps", message.taps_size), ("hidden", message.hidden_size)):
        end = begin + message.num_tokens * size * _ITEM_BYTES[message.dtype]
        header[name] = {"dtype": message.dtype, "shape": [message.num_tokens, size], "data_offsets": [begin, end]}
        begin = end
    return header  # type: ignore[return-value]  # dtype is a string


def _are_bfloat16(array: FeatureArray) -> bool:
    return not (array.view("<u4") & 0xFFFF).any()


def _to_bytes(array: FeatureArray, dtype: str) -> memoryview:
    values = array if dtype == "F32" else (array.view("<u4") >> 16).astype("<u2")
    return values.reshape(-1).view(np.uint8).data


def _from_bytes(data: memoryview, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "F32":
        return np.frombuffer(data, "<f4")
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
