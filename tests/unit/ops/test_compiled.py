# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numba import vectorize

from adaflash.ops import compiled as compiled_module
from adaflash.ops.compiled import exp

exp_of = vectorize(["float32(float32)"])(lambda x: exp(x))


def test_exp_is_within_two_ulp():
    x = np.concatenate([np.linspace(-87, 88, 1_000_001), np.linspace(-1e-3, 1e-3, 10_001)]).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    assert np.abs((exp_of(x) - expected) / np.spacing(expected.astype(np.float32))).max() <= 2


@pytest.mark.parametrize(("x", "expected"), [(-1e30, 0), (-np.inf, 0), (-90, 0), (1e30, np.inf), (np.inf, np.inf)])
def test_exp_leaves_its_range_for_zero_and_infinity(x, expected):
    assert exp_of(np.float32(x)) == expected


def test_exp_keeps_nan():
    assert np.isnan(exp_of(np.float32("nan")))


@dataclass
class Package:
    """A package of one module with kernels, in a folder of its own, and the cache folders numba may use for it."""

    module: Path
    user_folder: Path
    given_folder: Path

    def load(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location("kernels_of_test", self.module)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def cached_files(self) -> list[Path]:
        return sorted(path for path in self.module.parent.parent.rglob("*.nb[ci]") if path.is_file())


def make_unwritable(folder: Path) -> None:
    """Put a file where the folder would be: unlike a mode, it stops root as well."""
    folder.write_text("")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Caching works in `module`'s folder; NUMBA_CACHE_DIR is unset."""
    for warn in (compiled_module._warn_uncached, compiled_module._warn_elsewhere):
        warn.cache_clear()
    module = tmp_path / "package" / "kernels.py"
    module.parent.mkdir()
    module.write_text(KERNELS)
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return Package(module, tmp_path / "user", tmp_path / "given")


KERNELS = """
from adaflash.ops.compiled import compiled

@compiled("void(float32[::1])")
def double(x_):
    for i in range(len(x_)):
        x_[i] *= 2

@compiled("void(float32[::1])")
def halve(x_):
    for i in range(len(x_)):
        x_[i] /= 2
"""


def warnings_after_use(package, caplog):
    """Load the package, check that its kernels compute, and return what was warned of."""
    caplog.clear()
    module = package.load()
    x = np.ones(3, dtype=np.float32)
    module.double(x)
    module.double(x)
    module.halve(x)
    assert x.tolist() == [2, 2, 2]
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_kernels_are_cached_beside_their_module_without_a_word(package, caplog):
    assert warnings_after_use(package, caplog) == []
    assert {path.parent for path in package.cached_files()} == {package.module.parent / "__pycache__"}


def test_a_kernel_is_compiled_again_when_what_kernels_are_made_of_has_changed(package, caplog, monkeypatch):
    warnings_after_use(package, caplog)
    before = package.cached_files()
    monkeypatch.setattr(compiled_module, "_sources_digest", lambda: "other")
    warnings_after_use(package, caplog)
    assert len(package.cached_files()) == 2 * len(before)


def test_where_nothing_can_be_cached_kernels_compile_and_one_warning_says_how_to_mend_it(package, caplog):
    make_unwritable(package.module.parent / "__pycache__")
    make_unwritable(package.user_folder)
    (warning,) = warnings_after_use(package, caplog)
    assert "compiled at every start: set NUMBA_CACHE_DIR to a folder that can be written" in warning
    assert package.cached_files() == []


def test_the_given_folder_mends_it(package, caplog, monkeypatch):
    make_unwritable(package.module.parent / "__pycache__")
    make_unwritable(package.user_folder)
    monkeypatch.setattr("numba.config.CACHE_DIR", str(package.given_folder))
    assert warnings_after_use(package, caplog) == []
    assert all(path.is_relative_to(package.given_folder) for path in package.cached_files())
    assert package.cached_files()


def test_a_given_folder_that_cannot_be_written_is_named_once(package, caplog, monkeypatch):
    make_unwritable(package.given_folder)
    monkeypatch.setattr("numba.config.CACHE_DIR", str(package.given_folder))
    (warning,) = warnings_after_use(package, caplog)
    assert "NUMBA_CACHE_DIR cannot be written" in warning
    assert str(package.given_folder) in warning


def test_a_kernel_whose_file_in_the_cache_cannot_be_opened_compiles_with_a_warning(package, caplog):
    warnings_after_use(package, caplog)
    indexes = [path for path in package.cached_files() if path.suffix == ".nbi"]
    assert len(indexes) == 2
    for index in indexes:
        index.unlink()
        index.mkdir()
    (warning,) = warnings_after_use(package, caplog)
    assert "compiled at every start" in warning
    assert "Is a directory" in warning
