# SPDX-License-Identifier: Apache-2.0
"""Caches of images follow the weights, and keep images that requests wait to read."""

from pathlib import Path

import pytest
from conftest import result_of

PROCESS = Path(__file__).parent / "image_caches_process.py"


@pytest.mark.slow
@pytest.mark.gpu_path
def test_caches_of_images_follow_the_weights(zygote, real_model, tmp_path):
    result = result_of(zygote.run([PROCESS, "weights", tmp_path, real_model]))
    assert result["recomputed"]
    assert result["asleep"] == result["awake"] == {"changed": True, "as_anew": True}


@pytest.mark.slow
def test_requests_read_their_images_in_shared_memory_after_a_sleep(zygote, real_model, tmp_path):
    result = result_of(zygote.run([PROCESS, "shared", tmp_path, real_model]))
    of_images = ["picture", "same", "two"]
    assert result["same_answers"] and result["text_goes_on"]
    assert result["bound"] == result["failed"] == of_images
    [why] = result["why"]
    assert "images in vLLM's shared memory could not leave the process that slept" in why
