# SPDX-License-Identifier: Apache-2.0
"""Programs of docs/howto run as they are shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HOWTO = Path(__file__).parents[2] / "docs/howto"


def shown(page: str) -> str:
    """Return the first program of a page."""
    return (HOWTO / f"{page}.md").read_text().split("```python\n")[1].split("```\n")[0]


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
