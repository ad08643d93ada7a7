# SPDX-License-Identifier: Apache-2.0
"""Programs of docs/howto run as they are shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from zygote import MOST_SECONDS

from torpor.vllm.policy import Policy
from torpor.vllm.server.recorder import RESPONSE_ID_STARTS

HOWTO = Path(__file__).parents[2] / "docs/howto"


def shown(page: str) -> str:
    """Return the first program of a page."""
    return (HOWTO / f"{page}.md").read_text().split("```python\n")[1].split("```\n")[0]


ANSWER = re.compile(r"^SessionAnswer\(outcome='(\w+)', reason='(.*)', bytes=(\d+), freed_bytes=(\d+)", re.MULTILINE)


@pytest.mark.slow
def test_an_agent_that_waits_computes_nothing_again(zygote, tiny_model, tmp_path):
    program = tmp_path / "agent.py"
    program.write_text(shown("agent-tool"))
    done = zygote.run([program, tiny_model, tmp_path / "disk"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = ANSWER.findall(done.stdout)
    assert [outcome for outcome, *_ in answers] == ["accepted"] * 3, done.stdout[-3000:]
    (_, _, demoted, freed), (_, _, prefetched, _), (_, _, pinned, _) = answers
    assert int(demoted) == int(prefetched) == int(freed) > 0 and int(pinned) > int(demoted)
    [cached] = re.findall(r"^(\d+) tokens were not computed again$", done.stdout, re.MULTILINE)
    assert int(cached) >= 300


@pytest.mark.slow
def test_a_tree_search_keeps_the_best_branch_and_drops_the_others(zygote, tiny_model, tmp_path):
    program = tmp_path / "search.py"
    program.write_text(shown("tree-search"))
    done = zygote.run([program, tiny_model], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    rounds = re.findall(r"at (\d+): (.*); branch (\d) goes on, (\d+) blocks were shared", done.stdout)
    assert [int(at) for at, *_ in rounds] == [12, 24, 36]
    for _, scores, kept, shared in rounds:
        branches = [float(score) for score in scores.split(", ")]
        assert len(branches) == 3 and branches[int(kept)] == max(branches) and int(shared) >= 1
        assert len(set(branches)) == 3  # each child has a seed of its own
    assert re.search(r"^60 tokens, -\d+\.\d+:['\"]", done.stdout, flags=re.M), done.stdout[-3000:]


def test_a_policy_stores_no_offline_prompt_of_a_server(monkeypatch, tmp_path):
    (tmp_path / "chats.py").write_text(shown("own-policy"))
    monkeypatch.syspath_prepend(tmp_path)
    policy = Policy("chats:Chats", MOST_SECONDS)
    keys, groups = [b"1", b"2"], [0, 0]
    for start in RESPONSE_ID_STARTS[:2]:  # a server's chats and completions
        assert policy.ask(0, f"{start}batch-7-0a1b2c3d", keys, groups) == b"\0\0"
        assert policy.ask(0, f"{start}7-batch-0a1b2c3d", keys, groups) == b"\1\1"
    assert policy.ask(0, None, keys, groups) == policy.ask(1, "chatcmpl-batch-7", keys, groups) == b"\1\1"
