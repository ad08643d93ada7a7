# SPDX-License-Identifier: Apache-2.0
"""vLLM's default GPU path on CPU tensors, for tests and the demo; see ../README.md.

    subprocess.run([sys.executable, "script.py"], env=os.environ | gpu_path.environment())

vLLM finds this package by its entry points, wherever its folder is on the module path. It does nothing unless
TORPOR_GPU_PATH is 1.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]
# Of vLLM 0.32, as VLLM_KV_CACHE_LAYOUT names them: L layers, B blocks, H heads, N tokens of a block, C content.
KV_LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")


def environment(
    *, kv_layout: str | None = None, kernel_block: int | None = None, slow_copies: bool = False, cuda: bool = True
) -> dict[str, str]:
    """The variables that put a new process, and those that it starts, on the GPU path.

    cuda: torpor has the memory that it has on a GPU, with gpu_preserve_state; else that of a CPU.

    A running process cannot get onto it: Triton looks at its variable when vLLM is imported.
    """
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "TORPOR_GPU_PATH": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(os.pathsep.join(paths).split(os.pathsep))),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    if kv_layout is not None:
        if kv_layout not in KV_LAYOUTS:
            raise ValueError(f"there is no KV layout {kv_layout!r}; there are {', '.join(KV_LAYOUTS)}")
        variables["VLLM_KV_CACHE_LAYOUT"] = kv_layout
    if kernel_block is not None:
        variables["TORPOR_GPU_PATH_KERNEL_BLOCK"] = str(kernel_block)
    if slow_copies:
        variables["TORPOR_GPU_PATH_SLOW_COPIES"] = "1"
    if cuda:
        variables |= {"TORPOR_GPU_PATH_CUDA": "1", "TORPOR_MEMORY_DEVICE": "host", "TORPOR_GPU_PRESERVE_STATE": "1"}
    return variables


def active() -> bool:
    """Whether this process is on the GPU path."""
    return os.environ.get("TORPOR_GPU_PATH") == "1"


def pretends_cuda() -> bool:
    """Whether the platform of this process is CUDA to torpor (cuda.py)."""
    return os.environ.get("TORPOR_GPU_PATH_CUDA") == "1"
