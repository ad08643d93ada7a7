# SPDX-License-Identifier: Apache-2.0
"""Caches of images follow the weights: no request reads what an encoder with other weights has made of its image."""

from pathlib import Path

import pytest
from conftest import result_of

PROCESS = Path(__file__).parent / "image_caches_process.py"


@pytest.mark.slow
@pytest.mark.gpu_path
def test_caches_of_images_follow_the_weights(zygote, real_model, tmp_path):
    result = result_of(zygote.run([PROCESS, tmp_path, real_model]))
    assert result["recomputed"]
    assert result["asleep"] == result["awake"] == {"changed": True, "as_anew": True}
