# SPDX-License-Identifier: Apache-2.0
"""Where an output ends inside an accepted block, everything about it equals plain decoding."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest

from adaflash.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.engine.tokenizer import Tokenizer
from adaflash.request import CompletionOutput, RequestOutput, SamplingParams
from tests.engines import TinySetup, oracle_engine, random_prompts, run_all, tiny_engine
from tests.tiny_tokenizer import write_byte_level_tokenizer

MAX_TOKENS = 16
PROMPTS = random_prompts(12, 97, 20, seed=3)
PARAMS = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def setup(tiny_setup: Callable[[str], TinySetup], tmp_path_factory: pytest.TempPathFactory) -> TinySetup:
    """A target with a tokenizer: ids from 3 on are single bytes."""
    found = tiny_setup("llama")
    target = tmp_path_factory.mktemp("stopping") / "target"
    shutil.copytree(found.target, target)
    write_byte_level_tokenizer(target)
    return replace(found, target=target)


@pytest.fixture(scope="module")
def tokenizer(setup: TinySetup) -> Tokenizer:
    return Tokenizer(setup.target)


@pytest.fixture(scope="module")
def plain(setup: TinySetup) -> Engine:
    return tiny_engine(setup, None, EngineConfig(num_kv_blocks=100))


@pytest.fixture(scope="module")
def speculative(setup: TinySetup, plain: Engine) -> Engine:
    """Drafts are always right, so that every round accepts a whole block and ends fall inside it."""
    outputs = run_all(plain, PROMPTS, replace(PARAMS, max_tokens=MAX_TOKENS + 8))
    continuations = {
        tuple(prompt): output.outputs[0].token_ids for prompt, output in zip(PROMPTS, outputs, strict=True)
    }
    return oracle_engine(setup, continuations, 1.0, EngineConfig(verify_policy="fixed", num_kv_blocks=100))


def _assert_same(plain: list[RequestOutput], speculative: list[RequestOutput]) -> None:
    for want, got in zip(plain, speculative, strict=True):
        assert got.usage == want.usage._replace(num_cached_tokens=got.usage.num_cached_tokens)
        for a, b in zip(want.outputs, got.outputs, strict=True):
            assert (a.text, a.token_ids, a.finish_reason, a.stop_reason) == (
                b.text,
                b.token_ids,
                b.finish_reason,
                b.stop_reason,
            )
            _assert_same_logprobs(a, b)


def _assert_same_logprobs(a: CompletionOutput, b: CompletionOutput) -> None:
    assert a.logprobs is not None
    assert b.logprobs is not None
    assert len(a.logprobs) == len(b.logprobs) == len(a.token_ids)
    for want, got, token_id in zip(a.logprobs, b.logprobs, a.token_ids, strict=True):
        assert want.chosen.token_id == got.chosen.token_id == token_id
        assert got.chosen.logprob == pytest.approx(want.chosen.logprob, abs=1e-4)
        assert [t.logprob for t in got.top] == pytest.approx([t.logprob for t in want.top], abs=1e-4)


def test_without_a_token_limit_the_context_limit_ends_the_output(setup: TinySetup) -> None:
    engine = tiny_engine(setup, "random", EngineConfig(num_kv_blocks=100, max_model_len=40, verify_policy="fixed"))
    endless = replace(PARAMS, max_tokens=None)
    for prompt in ([5], [5] * 20, [5] * 39):
        output = run_all(engine, [prompt], endless)[0].outputs[0]
        assert (len(prompt) + len(output.token_ids), output.finish_reason) == (40, "length")


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_length_limit_at_every_offset(plain: Engine, speculative: Engine, max_tokens: int) -> None:
    params = replace(PARAMS, max_tokens=max_tokens)
    got = run_all(speculative, PROMPTS, params)
    _assert_same(run_all(plain, PROMPTS, params), got)
    assert all(len(r.outputs[0].token_ids) == max_tokens for r in got)
    assert max_tokens < 3 or all(r.speculation.num_verified_tokens > 0 for r in got)


@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("by", ["stop_token_ids", "stop", "stop_included"])
def test_stop_at_every_offset(plain: Engine, speculative: Engine, tokenizer: Tokenizer, offset: int, by: str) -> None:
    """Each prompt stops at what plain decoding emits at `offset`, by id or by text."""
    base = run_all(plain, PROMPTS, PARAMS)
    each = []
    for output in base:
        token_id = output.outputs[0].token_ids[offset]
        if by == "stop_token_ids":
            each.append(replace(PARAMS, stop_token_ids=[token_id]))
            continue
        stop = tokenizer.decode([token_id]) or "never"
        each.append(replace(PARAMS, stop=[stop], include_stop_str_in_output=by == "stop_included"))
    want = run_all(plain, PROMPTS, each)
    got = run_all(speculative, PROMPTS, each)
    _assert_same(want, got)
    stopped = [r for r in got if r.outputs[0].finish_reason == "stop"]
    assert len(stopped) >= len(got) // 2
    assert all(len(r.outputs[0].token_ids) <= offset + 1 for r in stopped)


@pytest.mark.parametrize("min_tokens", [3, 6])
def test_min_tokens_bans_stop_ids_inside_a_block(plain: Engine, speculative: Engine, min_tokens: int) -> None:
    base = run_all(plain, PROMPTS, PARAMS)
    each = [replace(PARAMS, stop_token_ids=[r.outputs[0].token_ids[1]], min_tokens=min_tokens) for r in base]
    want, got = run_all(plain, PROMPTS, each), run_all(speculative, PROMPTS, each)
    _assert_same(want, got)
    assert all(len(r.outputs[0].token_ids) > min_tokens for r in got)


@pytest.mark.parametrize("after", range(6))
def test_abort_at_every_step_returns_a_prefix_of_plain_decoding(plain: Engine, speculative: Engine, after: int) -> None:
    want = run_all(plain, PROMPTS[:1], PARAMS)[0].outputs[0]
    request_id = speculative.add_request(PROMPTS[0], PARAMS)
    token_ids: list[int] = []
    for _ in range(after):
        for delta in speculative.step():
            token_ids += delta.outputs[0].token_ids
    last = speculative.abort(request_id)
    finished_before = len(token_ids) == MAX_TOKENS
    assert (last is None) == finished_before
    assert want.token_ids[: len(token_ids)] == token_ids
    if last is not None:
        assert last.outputs[0].finish_reason == "abort"
        assert last.usage.num_output_tokens == len(token_ids)
    stats = speculative.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    assert run_all(speculative, PROMPTS[:1], PARAMS)[0].outputs[0].token_ids == want.token_ids


def test_streamed_deltas_add_up_to_the_reply(plain: Engine, speculative: Engine) -> None:
    for engine in (plain, speculative):
        whole = run_all(engine, PROMPTS, PARAMS)
        ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
        text: dict[str, str] = dict.fromkeys(ids, "")
        tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
        while engine.has_unfinished():
            for delta in engine.step():
                text[delta.request_id] += delta.outputs[0].text
                tokens[delta.request_id] += delta.outputs[0].token_ids
        assert [tokens[i] for i in ids] == [r.outputs[0].token_ids for r in whole]
        assert [text[i] for i in ids] == [r.outputs[0].text for r in whole]
