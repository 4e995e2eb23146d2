# SPDX-License-Identifier: Apache-2.0
"""Spoils a good version in every way that is thought of, thousands of times: all are refused, by one kind of error."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaflash.errors import PayloadError, WeightError
from adaflash.training.drafter_layout import DrafterLayout
from adaflash.training.manifest import FileInfo, Manifest, layout_signature
from adaflash.training.payload import PayloadChecker
from adaflash.training.version_directory import write_manifest
from tests.versions import TARGET_DIGEST, publication, tiny_drafter, write_like

ROUNDS = 360
MODEL = "model.safetensors"
CHUNK_BYTES = 4096
NON_FINITE = {"F32": [b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff", b"\x01\x00\x80\x7f"]}

Header = dict[str, Any]


class Good:
    """The bytes of a good version, and its parts."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest
        self.data = (directory / MODEL).read_bytes()
        header_end = 8 + int.from_bytes(self.data[:8], "little")
        self.header: Header = json.loads(self.data[8:header_end])
        self.tensors = self.data[header_end:]
        self.names = [name for name in self.header if name != "__metadata__"]

    def with_header(self, header: Header | bytes, tensors: bytes | None = None) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + (self.tensors if tensors is None else tensors)

    def copy_of_header(self) -> Header:
        copied: Header = json.loads(json.dumps(self.header))
        return copied


# ---- bytes that differ from what was published: the manifest is the good one's -----------------------------------


def flip(rng: random.Random, good: Good) -> bytes:
    data = bytearray(good.data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def truncate(rng: random.Random, good: Good) -> bytes:
    return good.data[: rng.randrange(len(good.data))]


def extend(rng: random.Random, good: Good) -> bytes:
    return good.data + rng.randbytes(rng.randint(1, 100))


def reorder(rng: random.Random, good: Good) -> bytes:
    chunks = [good.data[at : at + CHUNK_BYTES] for at in range(0, len(good.data), CHUNK_BYTES)]
    first, second = rng.sample(range(len(chunks)), 2)
    chunks[first], chunks[second] = chunks[second], chunks[first]
    return b"".join(chunks)


def replay(rng: random.Random, good: Good) -> bytes:
    at = rng.randrange(0, len(good.data) - CHUNK_BYTES, CHUNK_BYTES)
    return good.data[: at + CHUNK_BYTES] + good.data[at:]


# ---- what a publisher may get wrong: the manifest is that of the bytes -------------------------------------------


def flip_header(rng: random.Random, good: Good) -> bytes:
    data = bytearray(good.data)
    data[rng.randrange(len(data) - len(good.tensors))] ^= 1 << rng.randrange(8)
    return bytes(data)


def duplicate(rng: random.Random, good: Good) -> bytes:
    name = rng.choice(good.names)
    again = json.dumps({name: good.header[rng.choice([name, *good.names])]})[1:]
    return good.with_header(json.dumps(good.header)[:-1].encode() + b", " + again.encode())


def rename(rng: random.Random, good: Good) -> bytes:
    header = good.copy_of_header()
    name = rng.choice(good.names)
    names = [
        "lm_head.weight",
        "embed_tokens.weight",
        "__metadata__",
        "",
        "../x",
        name + " ",
        name.upper(),
        "\u0000",
        "é" * 9,
    ]
    renamed = {("" if key == name else key): value for key, value in header.items()}
    renamed[rng.choice(names)] = renamed.pop("")
    return good.with_header(renamed)


def reshape(rng: random.Random, good: Good) -> bytes:
    header = good.copy_of_header()
    entry = header[rng.choice(good.names)]
    shape: list[Any] = entry["shape"]
    change: list[Callable[[list[Any]], list[Any]]] = [
        lambda s: [*s, 1],
        lambda s: [s[0] + 1, *s[1:]],
        lambda s: [2**63, *s],
        lambda s: [10**300] * 9,
        lambda s: [-1, *s],
        lambda s: [float(s[0]), *s[1:]],
        lambda s: [str(s[0]), *s[1:]],
        lambda s: [],
        lambda s: [0],
        lambda s: s[::-1] if s != s[::-1] else [*s, 1, 1],
        lambda s: [True, *s],
        lambda s: [[s]],
    ]
    entry["shape"] = rng.choice(change)(shape)
    return good.with_header(header)


def retype(rng: random.Random, good: Good) -> bytes:
    header = good.copy_of_header()
    entry = header[rng.choice(good.names)]
    others = [
        "F16",
        "BF16",
        "I32",
        "U8",
        "F8_E4M3",
        "f32",
        "",
        None,
        5,
        [],
        {},
        "I64" if entry["dtype"] == "F32" else "F64",
    ]
    entry["dtype"] = rng.choice(others)
    return good.with_header(header)


def move(rng: random.Random, good: Good) -> bytes:
    header = good.copy_of_header()
    entry = header[rng.choice(good.names)]
    begin, end = entry["data_offsets"]
    offsets: list[Any] = [[begin + 1, end + 1], [begin, end - 1], [end, begin], [-1, end], [begin], [begin, end, end]]
    offsets += [None, "x", [begin, 2**70], [0, end - begin] if begin else [4, end - begin + 4], [begin, float(end)]]
    entry["data_offsets"] = rng.choice(offsets)
    return good.with_header(header)


def lose(rng: random.Random, good: Good) -> bytes:
    header = good.copy_of_header()
    entry = header.pop(rng.choice(good.names))
    begin, end = entry["data_offsets"]
    for other in header.values():
        if "data_offsets" in other and other["data_offsets"][0] >= end:
            other["data_offsets"] = [offset - (end - begin) for offset in other["data_offsets"]]
    return good.with_header(header, good.tensors[:begin] + good.tensors[end:])


def add_many(rng: random.Random, good: Good) -> bytes:
    header = good.copy_of_header()
    end = len(good.tensors)
    for index in range(rng.choice([1, 2, 5, 10, 100, 5000])):
        header[f"t{index}"] = {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}
    return good.with_header(header)


def odd_header(rng: random.Random, good: Good) -> bytes:
    huge = rng.choice([2**63, 2**64 - 1, 100_000_000, len(good.data), len(good.data) - 7])
    nested = rng.choice([b"[", b'{"a":']) * rng.choice([2000, 100_000])
    headers: list[Callable[[], bytes]] = [
        lambda: huge.to_bytes(8, "little") + good.data[8:],
        lambda: good.with_header(nested),
        lambda: good.with_header(rng.choice([b"", b"null", b"[]", b"7", b"NaN", b"\xff\xfe{}", b'{"a"', b"{}"])),
        lambda: good.with_header(json.dumps(good.header).encode("utf-16")),
        lambda: good.with_header(json.dumps(good.header)[:-1].encode() + b', "\\ud800": 1}'),
        lambda: good.with_header(json.dumps(good.header).replace("[0,", "[" + "9" * 5000 + ",").encode()),
        lambda: good.with_header(json.dumps(good.header).encode() + b" " * (2 << 20)),
        lambda: rng.randbytes(rng.randrange(200)),
    ]
    return rng.choice(headers)()


def not_finite(rng: random.Random, good: Good) -> bytes:
    name = rng.choice([name for name in good.names if good.header[name]["dtype"] == "F32"])
    begin, end = good.header[name]["data_offsets"]
    at = rng.randrange(begin, end, 4)
    return good.with_header(good.header, good.tensors[:at] + rng.choice(NON_FINITE["F32"]) + good.tensors[at + 4 :])


def change_constant(rng: random.Random, good: Good) -> bytes:
    begin, end = good.header["d2t"]["data_offsets"]
    tensors = bytearray(good.tensors)
    tensors[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)
    return good.with_header(good.header, bytes(tensors))


DIFFERENT = (flip, truncate, extend, reorder, replay)
WRONG = (flip_header, duplicate, rename, reshape, retype, move, lose, add_many, odd_header, not_finite, change_constant)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    folder = tmp_path_factory.mktemp("good")
    drafter = tiny_drafter(folder, draft_vocab_size=40)
    directory = folder / "version"
    directory.mkdir()
    write_like(drafter, 1)(directory)
    return Good(directory, write_manifest(directory, 5, publication(), None).manifest)


def _manifest_of(data: bytes, good: Good, claims_good_tensors: bool) -> Manifest:
    """Return the manifest a publisher of these bytes would write, or one that claims other tensors than there are."""
    model = FileInfo(MODEL, len(data), hashlib.sha256(data).hexdigest())
    manifest = dataclasses.replace(good.manifest, files=(model, good.manifest.file("config.json")))
    if claims_good_tensors:
        return manifest
    tensors = good.manifest.tensors[1:]
    return dataclasses.replace(manifest, tensors=tensors, layout_signature=layout_signature(tensors))


def test_thousands_of_spoilt_versions_are_refused_and_the_next_good_one_is_accepted(good: Good) -> None:
    checker = PayloadChecker(DrafterLayout.of(good.directory), TARGET_DIGEST)
    rng = random.Random(20261130)
    refused: Counter[str] = Counter()
    messages: list[str] = []
    path = good.directory / MODEL
    for index in range(ROUNDS):
        for spoil in (*DIFFERENT, *WRONG):
            data = spoil(rng, good)
            if data == good.data:
                continue
            manifest = good.manifest if spoil in DIFFERENT else _manifest_of(data, good, rng.random() < 0.9)
            path.unlink()  # a new file is written several times faster than an old one is overwritten
            path.write_bytes(data)
            try:
                checker.check(good.directory, manifest)
            except PayloadError as error:
                messages.append(str(error))
                refused[spoil.__name__] += 1
            else:
                assert spoil is flip_header, f"{spoil.__name__} was accepted"
                _assert_means_the_same(data, good)
        if index % 20 == 0:
            path.write_bytes(good.data)
            checker.check(good.directory, good.manifest)
    path.write_bytes(good.data)
    checker.check(good.directory, good.manifest)
    assert max(map(len, messages)) < 1000
    assert len("".join(messages).encode()) > 0, "what a refusal says can be logged and sent"
    assert sum(refused.values()) >= 5000, refused
    assert min(refused.values()) > ROUNDS * 0.8, refused


def _assert_means_the_same(data: bytes, good: Good) -> None:
    """A flip in the header that is accepted changed nothing that is read, e.g. one kind of space to another."""
    header_end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:header_end])
    assert {name: header[name] for name in good.names} == {name: good.header[name] for name in good.names}
    assert data[header_end:] == good.tensors


def test_hundreds_of_spoilt_manifests_are_refused(good: Good) -> None:
    rng = random.Random(7)
    checker = PayloadChecker(DrafterLayout.of(good.directory), TARGET_DIGEST)
    text = good.manifest.to_json()
    num_refused = 0
    for _ in range(1500):
        data = bytearray(text)
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(len(data))
            if rng.random() < 0.5:
                data[at] ^= 1 << rng.randrange(8)
            else:
                del data[at : at + rng.randint(1, 30)]
        try:
            manifest = Manifest.from_json(bytes(data), "manifest.json")
            checker.check(good.directory, manifest)
        except WeightError:
            num_refused += 1
        else:
            assert manifest.tensors == good.manifest.tensors
            assert manifest.files == good.manifest.files
            assert manifest.target_digest == good.manifest.target_digest
    assert num_refused > 1200
