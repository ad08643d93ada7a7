# SPDX-License-Identifier: Apache-2.0
"""A model without a KV cache, an encoder that embeds, sleeps as any other. Its requests begin again."""

import os
from pathlib import Path

import gpu_path
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


@pytest.mark.gpu_path
@pytest.mark.slow
def test_on_a_gpu_it_starts_and_sleeps_without_its_requests(gpu_path_zygote, tiny_model, tmp_path):
    """vLLM allocates no KV cache inside the region of its runtime state."""
    words = [HERE / "encoder_process.py", tiny_model, tmp_path]
    result = result_of(gpu_path_zygote.run(words, env=os.environ | gpu_path.environment(cuda=True)))
    assert result["misused"] == [] and result["after"] == [result["before"]]
    assert result["tags"][0]["weights"] == "detached"
    [refused] = result["refused"]
    assert "EncoderOnlyModelState" in refused
