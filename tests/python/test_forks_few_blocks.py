# SPDX-License-Identifier: Apache-2.0
"""Children of a live request in an engine without a prefix cache, and with few blocks.

On the GPU path these tests have a process of their own: engines of one process on one device are refused.
"""

from __future__ import annotations

import pytest
from conftest import InProcess
from requests_of_tests import run
from test_forks import ALONE, alike, finished, forked, settled, whole
from test_sessions import tokens_of, unfinished
from vllm import SamplingParams

from torpor import errors

pytestmark = [pytest.mark.gpu_path, pytest.mark.cpu]


@pytest.fixture(scope="session")
def tight(tiny_model, tmp_path_factory) -> InProcess:
    return InProcess(
        tiny_model, tmp_path_factory.mktemp("tight"), torpor={"sessions": True}, requests=ALONE,
        num_gpu_blocks_override=100, enable_prefix_caching=False,
    )  # fmt: skip


def test_without_a_prefix_cache_blocks_are_shared_too(tight):
    expected = tight.expected
    names = ["greedy", "seeded", "prefix-a", "long-seeded", "stops"]
    answers = tight.begin(9, names)
    settled(tight)
    made = {name: forked(tight, name, 2) for name in unfinished(tight)}
    assert any(each.shared_blocks > 0 for each in made.values())
    tight.engine.abort_request(["prefix-a"])
    found = finished(tight, answers, made)
    for name, each in made.items():
        for child in each.children:
            assert alike(found[child], expected[name]), child
    whole(tight)


def test_want_of_blocks_preempts_and_computes_again(tight, monkeypatch):
    """All children run to their end, though the blocks are not enough for all at once: each wants a second one."""
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=40, ignore_eos=True)
    tight.engine.add_request("plain", "Once upon a time", params.clone())
    plain = run(tight.engine)["plain"]
    tight.engine.add_request("parent", "Once upon a time", params.clone())
    run(tight.engine, 6)
    settled(tight)
    pool = tight.core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    made = forked(tight, "parent", free)
    with pytest.raises(errors.NotEnoughRoom, match="a fork needs 1 KV blocks, 0 are free"):
        tight.llm.torpor.fork("parent", 1)
    preempted, stock = [], tight.core.scheduler._preempt_request

    def preempt(request, *more, **others):
        preempted.append(request.request_id)
        return stock(request, *more, **others)

    monkeypatch.setattr(tight.core.scheduler, "_preempt_request", preempt)
    found = tight.finish({})
    assert preempted and len(found) == free + 1
    for name in ("parent", *made.children):
        assert tokens_of({name: found[name]}) == tokens_of({name: plain})
    whole(tight)
