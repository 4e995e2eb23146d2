# SPDX-License-Identifier: Apache-2.0
"""What the layout of the repository promises; the import direction is import-linter's part."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 500
HOST_ONLY_MODULES = (
    "adaflash.engine.scheduler",
    "adaflash.engine.sequence",
    "adaflash.cache.block_manager",
    "adaflash.speculative.budget",
    "adaflash.training.weight_store",
    "adaflash.config",
    "adaflash.request",
    "adaflash.errors",
)
DEVICE_LIBRARIES = {"torch", "triton", "torch_npu"}
# An `__init__.py` in one of these would shadow a real package of the same name.
FOLDERS_OF_NO_PACKAGE = ("backends", "backends/cuda", "backends/ascend", "proto", "tools", "tests")


def _sources(*folders: str) -> list[Path]:
    """Python files of the folders, generated ones left out."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "rpc/pb" not in path.as_posix()]


def _names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def _is_public(path: Path) -> bool:
    return path.name == "__init__.py" or not path.name.startswith("_")


def _loaded_by(module: str) -> set[str]:
    """Top-level modules in a fresh interpreter that imported `module`."""
    code = f"import {module}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(result.stdout.split())


def _links(page: Path) -> list[str]:
    """Relative link targets of a Markdown page, without their anchors."""
    targets = re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8"))
    return [target for target in targets if "://" not in target]


def test_importing_adaflash_loads_no_device_library() -> None:
    assert not _loaded_by("adaflash") & DEVICE_LIBRARIES


@pytest.mark.parametrize("module", HOST_ONLY_MODULES)
def test_host_only_modules_load_no_device_library(module: str) -> None:
    assert not _loaded_by(module) & DEVICE_LIBRARIES


def test_files_are_short() -> None:
    sources = _sources("adaflash", "backends", "tools", "tests")
    assert len(sources) > 100, "the search found the repository"
    assert _names([p for p in sources if len(p.read_text(encoding="utf-8").splitlines()) > MAX_LINES]) == []


def test_folders_of_no_package_have_no_init_file() -> None:
    assert [folder for folder in FOLDERS_OF_NO_PACKAGE if (ROOT / folder / "__init__.py").exists()] == []


def test_public_modules_say_what_they_are() -> None:
    public = [path for path in _sources("adaflash", "backends", "tools") if _is_public(path)]
    assert _names([p for p in public if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))]) == []


def test_files_name_their_licence() -> None:
    sources = _sources("adaflash", "backends", "tools", "tests")
    first_lines = {path: path.read_text(encoding="utf-8").partition("\n")[0] for path in sources}
    assert _names([p for p, line in first_lines.items() if line != "# SPDX-License-Identifier: Apache-2.0"]) == []


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = [f"{page.name}: {link}" for page in pages for link in _links(page) if not (page.parent / link).exists()]
    assert broken == []
