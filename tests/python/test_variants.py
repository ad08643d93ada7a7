# SPDX-License-Identifier: Apache-2.0
"""Other options of the engine and of torpor, beside the same reference run."""

import json
from pathlib import Path

import pytest
import gpu_path
from conftest import IN_PROOF as PROOF
from conftest import long_on_gpu_path, result_of
from requests_of_tests import REQUESTS

HERE = Path(__file__).parent
PREEMPTED = "so few blocks that requests are preempted"
VARIANTS = {
    "linear weights left unpacked": {"torpor": {"cpu_linear": "plain"}},
    "nothing cached is kept": {"torpor": {"kv_budget_bytes": 0}},
    "scheduling by priority, no prefix cache": {"scheduling_policy": "priority", "enable_prefix_caching": False},
    PREEMPTED: {
        "num_gpu_blocks_override": 34,
        "max_model_len": 704,
        "sleep_at": [4, 15, 30] if PROOF else [15],
    },
    "encrypted, compressed, linking earlier chunks": {
        "torpor": {"key_file": "KEY", "encrypt": True, "compression": "zstd", "incremental": True},
        "sleep_at": [4, 15, 30] if PROOF else [4, 15],  # the second links chunks of the first
    },
    "too little host memory": {
        "torpor": {
            "arena_budget_bytes": 7 << 20,
            "spill_dir": "SPILL",
            "key_file": "KEY",
            "retain_kv_bytes": 1 << 20,
        },
        "sleep_at": [12, 13] if PROOF else [12],
        "to": ["host"],
    },
    "bfloat16, compressed, large steps": {
        "dtype": "bfloat16",
        "max_num_batched_tokens": 2048,
        "torpor": {"compression": "bf16"},
        "sleep_at": [15],
    },
    "bfloat16, packed in host memory": {
        "dtype": "bfloat16",
        "torpor": {"host_compression": "bf16", "retain_kv_bytes": 1 << 24},
        "sleep_at": [9],
        "to": ["host"],
    },
}


ON_GPU_PATH = ("scheduling by priority, no prefix cache",)
IN_PROOF = (
    "linear weights left unpacked",
    "nothing cached is kept",
    "scheduling by priority, no prefix cache",
    "bfloat16, compressed, large steps",
    "bfloat16, packed in host memory",
)


def _marked(name):
    marks = [
        *([pytest.mark.gpu_path] if name in ON_GPU_PATH else []),
        *([pytest.mark.long] if name in IN_PROOF else []),
        *(
            [pytest.mark.skipif(gpu_path.active(), reason="preemption there: test_gpu_path.py")]
            if name == PREEMPTED
            else []
        ),
    ]
    return pytest.param(name, marks=marks)


@long_on_gpu_path
@pytest.mark.slow
@pytest.mark.parametrize("name", [_marked(name) for name in VARIANTS])
def test_identical_with(name, zygote, tiny_model, tmp_path):
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_bytes(bytes(range(32)))
    sleep_at = {"sleep_at": [9]} if gpu_path.active() else {}
    options = json.dumps(VARIANTS[name] | sleep_at).replace("KEY", str(key)).replace("SPILL", str(tmp_path / "spill"))
    result = result_of(zygote.run([HERE / "variant_process.py", tiny_model, tmp_path / "store", options]))
    assert result["differing"] == []
    assert result["answers"] == len(REQUESTS)
    assert (result["spilled"] > 0) == ("too little" in name)
    assert (result["held"] <= 0.78) == ("packed in host" in name), "host memory, of what is kept there"
    assert not any((tmp_path / "spill").glob("*"))
    preempted = name == PREEMPTED
    assert (result["preemptions"] > 0) == preempted
    # vLLM computes the KV of a preempted request again, with a sleep or without.
    assert (result["recomputed"] > 0) == preempted
