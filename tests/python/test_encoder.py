# SPDX-License-Identifier: Apache-2.0
"""A model without a KV cache, an encoder that embeds, sleeps as any other. Its requests begin again."""

from pathlib import Path

import pytest
from conftest import result_of

HERE = Path(__file__).parent


@pytest.mark.core
@pytest.mark.slow
def test_a_model_without_a_kv_cache_sleeps_and_wakes(zygote, tiny_model, tmp_path):
    result = result_of(zygote.run([HERE / "encoder_process.py", tiny_model, tmp_path]))
    assert len(result["before"]) == 3 and all(len(embedding) == 128 for embedding in result["before"])
    assert result["after"] == [result["before"]] * 4
    assert result["tags"] == [{"weights": "detached", "freed": True}] * 2
    assert len(result["refused"]) == 4 and all("a model without a KV cache" in each for each in result["refused"])
