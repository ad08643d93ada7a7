# SPDX-License-Identifier: Apache-2.0
"""What torpor sets on vLLM is counted, in processes with an engine that uses it and with one that does not."""

import os
import sys
from pathlib import Path

import pytest
from conftest import result_of

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

from devtool import touches  # noqa: E402


@pytest.fixture(scope="module")
def seen(zygote, tiny_model, tmp_path_factory) -> dict[str, dict]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORPOR_")}

    def run(word: str) -> dict:
        words = [Path(touches.PROCESS), tiny_model, tmp_path_factory.mktemp(word), word]
        return result_of(zygote.run(words, env=environment))

    return {word: run(word) for word in ("used", "unused")}


@pytest.mark.slow
@pytest.mark.long
def test_where_no_engine_asks_two_attributes_of_vllm_are_torpors(seen):
    found = [f"{touch.owner}.{touch.name}" for touch in touches.found(seen["unused"], seen["unused"])]
    assert found == [
        "vllm.config.vllm.VllmConfig._post_init_kv_transfer_config",
        "vllm.platforms.cpu.CpuPlatform.is_sleep_mode_available",
    ]


@pytest.mark.slow
@pytest.mark.long
def test_where_one_does_no_more_is_touched_than_is_known(seen):
    """A new one is a decision: it is counted here, and docs/measurements.md has the numbers."""
    found = touches.found(seen["used"], seen["unused"])
    assert (sum(touch.replaced for touch in found), len(found)) == (11, 16), "\n".join(map(str, found))
    assert not [touch for touch in found if "Scheduler" in touch.owner or "worker.Worker" in touch.owner]
