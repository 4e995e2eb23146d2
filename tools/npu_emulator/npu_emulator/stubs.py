# SPDX-License-Identifier: Apache-2.0
"""Builds the stub CANN libraries into a cache folder: the runtime of csrc, and a named stub for everything else."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

from npu_emulator import settings
from npu_emulator.binaries import BuildError, find_missing, package_folder, tool

_SOURCES = Path(__file__).parent / "csrc"
_RUNTIME = "libascendcl.so"
_OPERATORS = "libopapi.so"
_LOOKED_UP = ("libnnopbase.so",)  # opened by name at run time
_EXPORTED = re.compile(r"^[\w][\w \*]*?\b((?:acl|npu_emulator)\w+)\([^;{]*\) \{", re.MULTILINE)

# Calls that set up, tune or tear down what an emulated device does not have: nothing to do is the right thing to do.
_NOTHING_TO_DO = re.compile(
    r"aclInit|aclFinalize|aclrtResetDevice(Force)?|aclrtSetOpWaitTimeout|aclrtSetOpExecuteTimeOut(V2)?"
    r"|aclrtSetDeviceSatMode|aclrtSetStream(FailureMode|OverflowSwitch|Attribute)|aclrtDestroyContext"
    r"|aclrt(PeekAt|Get)LastError|aclrtDeviceEnablePeerAccess|aclop(SetAttr\w*|DestroyAttr)|aclDestroy(TensorDesc|DataBuffer)"
    r"|aclSetCompileopt|aclrtSetExceptionInfoCallback|aclprof\w*|aclmdl(Init|Finalize|Set)Dump|aclrtHostUnregister"
    r"|aclrt(Un)?[Ss]ubscribeReport|aclopSetModelDir|aclAppLog|aclDestroyAclOpExecutor|aclrtCmoAsync|HcclSetConfig|aclSetTensorFormat\w*|aclSetTensorPlaceMent|aclSetTensorDesc\w*"
)


def _stub(name: str) -> str:
    if not re.match(r"acl|Hccl|hccl", name) or _NOTHING_TO_DO.fullmatch(name):
        return f"long {name}(void) {{ return 0; }}"  # what has a mangled C++ name is linked but never called
    return f'int {name}(void) {{ return npu_emulator_unknown("{name}"); }}'


def _compile(target: Path, sources: list[Path], *flags: str | Path) -> None:
    common = ("-O1", "-w", "-Werror=implicit-function-declaration", "-fPIC", "-shared", "-pthread")
    tool("gcc", *common, f"-Wl,-soname,{target.name}", "-o", target, *sources, *flags)


def _write_libraries(folder: Path) -> None:
    missing = find_missing()
    own = sorted(_SOURCES.glob("*.c"))
    exported = {name for source in own for name in _EXPORTED.findall(source.read_text())}
    stubs = folder / "stubs.c"
    lines = [_stub(name) for name in missing.functions if name not in exported]
    stubs.write_text("\n".join(["int npu_emulator_unknown(const char *name);", *lines, ""]))
    _compile(folder / _RUNTIME, [*own, stubs], "-ldl")
    operators = folder / "operators.c"
    lines = [f'int {name}(void) {{ return npu_emulator_aclnn("{name}"); }}' for name in missing.operators]
    operators.write_text("\n".join(["int npu_emulator_aclnn(const char *name);", *lines, ""]))
    # Every library depends on the runtime, so that its symbols are in the scope of whatever needs them.
    link = ("-Wl,--no-as-needed", f"-L{folder}", "-lascendcl", "-Wl,-rpath,$ORIGIN")
    _compile(folder / _OPERATORS, [operators], *link)
    empty = folder / "empty.c"
    empty.write_text("")
    for name in {*missing.libraries, *_LOOKED_UP} - {_RUNTIME, _OPERATORS}:
        _compile(folder / name, [empty], *link)


def _key() -> str:
    """Changes with torch, torch_npu and whatever takes part in the build."""
    digest = hashlib.sha256()
    for path in sorted([*_SOURCES.iterdir(), Path(__file__), Path(__file__).with_name("binaries.py")]):
        digest.update(path.name.encode() + path.read_bytes())
    return f"torch_npu-{version('torch_npu')}-torch-{version('torch')}-{digest.hexdigest()[:16]}"


def cache_folder() -> Path:
    """The folder of all builds: NPU_EMULATOR_CACHE, or npu-emulator in the user's cache folder."""
    if folder := os.environ.get(settings.CACHE):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npu-emulator"


def build() -> Path:
    """The folder of the stub libraries for the torch_npu installed here, built unless it is there already.

    Several processes may build at once: each writes a folder of its own, and one of them gets the name.

    Raises:
        BuildError: torch_npu or a tool is missing, or the compiler failed.
    """
    package_folder("torch_npu")
    target = cache_folder() / _key()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write_libraries(partial)
        partial.chmod(0o755)
        partial.rename(target)
    except OSError as error:
        if not target.exists():
            raise BuildError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target
