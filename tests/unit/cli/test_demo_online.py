# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest

from adaflash.cli import demo
from adaflash.cli.demo_online import last_third, prompts_of, run, windows
from adaflash.cli.online_replay import Acceptance, ReplayedRequest, live_acceptance
from adaflash.cli.online_session import ActiveVersion, ServedRequest, SessionRecord
from adaflash.errors import ConfigError
from adaflash.training.trajectories import RoundCounts, Trajectory


def served(finished_s: float, tokens: int, rounds: int, version: int) -> ServedRequest:
    return ServedRequest("r", "maths", 0.0, finished_s, (version,), tokens, rounds, tokens - 1, 0, 0)


def replayed(number: int, online: Acceptance) -> ReplayedRequest:
    return ReplayedRequest(str(number), float(number), online, Acceptance(10, 11, (1,)), Acceptance(10, 12, (2, 1)))


def test_acceptance_adds_up_whatever_the_number_of_positions() -> None:
    total = Acceptance(2, 5, (2, 1)) + Acceptance(2, 3, (1,)) + Acceptance()
    assert total == Acceptance(4, 8, (3, 1))
    assert total.length == 2.0
    assert total.per_position == [0.75, 0.25]
    assert math.isnan(Acceptance().length)


def test_the_live_acceptance_is_what_the_rounds_say() -> None:
    rounds = [RoundCounts(3, 2), RoundCounts(3, 0), RoundCounts(0, 0), RoundCounts(2, 1)]
    trajectory = Trajectory("r", 0, list(range(5 + 8)), 5, rounds, 1, "digest", 0.0)
    assert live_acceptance(trajectory) == Acceptance(4, 7, (2, 1))


def test_the_last_third_is_of_the_traffic() -> None:
    requests = [replayed(i, Acceptance(10, 10 + i)) for i in range(9)]
    last = last_third(requests)
    assert last["online"] == Acceptance(30, 16 + 17 + 18)
    assert last["frozen"] == Acceptance(30, 33, (3,))
    assert last["osd"].per_position == [0.2, 0.1]


def test_windows_cover_the_time_and_the_empty_ones_too() -> None:
    requests = [served(1.0, 31, 10, 0), served(29.0, 31, 20, 1), served(61.0, 11, 10, 2)]
    found = windows(requests, 95.0)
    assert [window.start_s for window in found] == [0.0, 30.0, 60.0]
    assert found[0].tokens_per_s == pytest.approx(62 / 30)
    assert found[0].acceptance_length == 2.0
    assert [window.newest_version for window in found] == [1, 0, 2]
    assert found[1].tokens_per_s == found[1].acceptance_length == 0.0


def test_the_chart_is_a_picture(tmp_path: Path) -> None:
    plot = pytest.importorskip("adaflash.cli.online_plot")
    record = SessionRecord([served(float(i), 20, 10, 1) for i in range(1, 40)], [ActiveVersion(1, 12.0, 30, 5)])
    plot.plot_session(tmp_path / "session.png", record, [replayed(i, Acceptance(10, 15, (5,))) for i in range(30)])
    assert (tmp_path / "session.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_are_of_the_domain_asked_for_and_switch_half_way() -> None:
    args = argparse.Namespace(domain="maths", switch_to="code", minutes=2.0, kinds=3)
    next_prompt = prompts_of(args)
    assert [next_prompt(now).domain for now in (0.0, 59.0, 61.0, 119.0)] == ["maths", "maths", "code", "code"]
    args = argparse.Namespace(domain="code", switch_to=None, minutes=2.0, kinds=3)
    assert prompts_of(args)(100.0).domain == "code"
    assert len({prompts_of(args)(0.0).prompt for _ in range(3)}) == 1, "the same for everybody"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--minutes", "0"], r"--minutes=0.0 is invalid: must be in \[0.1, 1440\]"),
        (["--concurrency", "65"], r"--concurrency=65 is invalid: must be in \[1, 64\]"),
        (["--max-tokens", "1000"], r"--max-tokens=1000 is invalid"),
        (["--domain", "maths", "--kinds", "53"], r"num_kinds=53 is invalid: must be in \[1, 52\]"),
        (["--kinds", "13"], r"num_kinds=13 is invalid: must be in \[1, 12\]"),
        (["--domain", "code", "--switch-to", "records", "--kinds", "13"], r"num_kinds=13 is invalid"),
        (["--domain", "chat"], r"--domain='chat' is invalid: must be one of records, maths, code with --online"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(flags: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    with pytest.raises(ConfigError, match=message):
        run(parser.parse_args(["demo", "--online", *flags]))
