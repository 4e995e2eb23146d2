# SPDX-License-Identifier: Apache-2.0
"""What is kept of an engine's steps: all rows of both models, and the seconds of drafting."""

from served_steps import StepWatch

from adaflash.config import EngineConfig
from adaflash.request import SamplingParams
from tests.engines import tiny_engine

PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5])


def watched_steps(setup, policy):
    config = EngineConfig(verify_policy=policy, max_num_seqs=2, enable_prefix_caching=False, num_speculative_tokens=2)
    engine = tiny_engine(setup, "random", config)
    watch, steps = StepWatch(engine), []
    for prompt in PROMPTS:
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    while engine.has_unfinished():
        engine.step()
        steps.append(watch.last)
    return steps, engine.stats()


def test_plain_steps_are_prompts_and_then_anchors(tiny_setup):
    steps, _ = watched_steps(tiny_setup("llama"), "off")
    assert [s[:4] for s in steps[:3]] == [(2, 8, 8, 0), (2, 2, 0, 8), (2, 2, 0, 10)]
    assert all(s.num_draft_rows == s.draft_s == s.num_draft_context == 0 for s in steps)
    assert all(s.rest_s > 0 for s in steps)


def test_drafts_count_where_they_are_made_and_where_they_are_verified(tiny_setup):
    steps, stats = watched_steps(tiny_setup("llama"), "fixed")
    assert steps[1]._replace(rest_s=0, draft_s=0)[:7] == (2, 6, 0, 8, 0, 6, 8)
    drafting = [s for s in steps if s.num_draft_rows]
    assert all(s.draft_s > 0 for s in drafting)
    assert sum(s.num_draft_rows for s in drafting) == 3 * stats.num_drafts
    num_anchors = sum(s.num_seqs for s in steps[1:])
    assert sum(s.num_tokens for s in steps[1:]) == num_anchors + stats.num_verified_tokens
