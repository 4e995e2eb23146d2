# SPDX-License-Identifier: Apache-2.0
"""Record operator schemas of torch_npu, which the Ascend backend's calls are tested against.

    python tools/npu_schemas.py --wheel torch_npu-2.10.0.post4-cp311-cp311-manylinux_2_28_x86_64.whl
    python tools/npu_schemas.py --installed

reads those of a wheel (`pip download --no-deps torch_npu==...`), which need not be installed, or those of the library
that is loaded here, and updates them in tests/unit/ascend/data/npu_schemas.json. Operators are those that the backend
requires, and those given.

A wheel's schemas are the texts its library registers. The wheel's npu_native_functions_by_codegen.yaml is no source: it
says `self` where operators are registered with `input`.
"""

from __future__ import annotations

import argparse
import json
import re
import zipfile
from collections.abc import Collection
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import torch

from adaflash_ascend.required_ops import REQUIRED_OPS

RECORD = Path(__file__).resolve().parents[1] / "tests" / "unit" / "ascend" / "data" / "npu_schemas.json"
LIBRARY_IN_WHEEL = "torch_npu/lib/libtorch_npu.so"

_SCHEMA_TEXT = re.compile(rb"([a-z_]\w*(?:\.\w+)?)\([ -~]*\) -> [ -~]+")


def main() -> None:
    """Update the record from what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--wheel", type=Path, help="a torch_npu wheel")
    source.add_argument("--installed", action="store_true", help="the torch_npu of this environment")
    parser.add_argument("ops", nargs="*", help="further operators, overload included: npu_format_cast, npu_x.out")
    args = parser.parse_args()
    wanted = sorted({*REQUIRED_OPS, *args.ops})
    if args.installed:
        found, number = installed_schemas(wanted), version("torch_npu").partition("+")[0]
        described = f"torch_npu {number}, loaded: torch._C._jit_get_all_schemas()"
    else:
        found, number = wheel_schemas(args.wheel, wanted), args.wheel.name.split("-")[1]
        described = f"{args.wheel.name} from PyPI: texts registered by {LIBRARY_IN_WHEEL}"
    missing = sorted(set(wanted) - set(found))
    if missing:
        parser.error(f"{described} has no {', '.join(missing)}")
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    record[number] = {"source": described, "schemas": dict(sorted(found.items()))}
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{RECORD}: {len(found)} operators of torch_npu {number}")


def installed_schemas(wanted: Collection[str]) -> dict[str, str]:
    """Return the schemas of the loaded library."""
    import_module("torch_npu")
    schemas = torch._C._jit_get_all_schemas()
    texts = {schema.name.removeprefix("npu::"): schema for schema in schemas if not schema.overload_name}
    texts |= {f"{s.name.removeprefix('npu::')}.{s.overload_name}": s for s in schemas if s.overload_name}
    return {name: str(texts[name]).removeprefix("npu::") for name in wanted if name in texts}


def wheel_schemas(wheel: Path, wanted: Collection[str]) -> dict[str, str]:
    """Return the schemas that a wheel's library registers."""
    with zipfile.ZipFile(wheel) as archive:
        matches = _SCHEMA_TEXT.finditer(archive.read(LIBRARY_IN_WHEEL))
    texts = {match[1].decode(): match[0].decode() for match in matches}
    return {name: texts[name] for name in wanted if name in texts}


if __name__ == "__main__":
    main()
