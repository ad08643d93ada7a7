#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes examples/sessions: two images of hibernated requests of a tiny random model, to look into without an engine.

    tools/dev python examples/make_images.py [DIRECTORY]

A request is forked at a token offset, and one of its children again; then all of them leave the engine. A new run makes
other ids, dates and digests: tools/dev reference then writes the page that shows them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from make_checkpoints import HERE, make_model

PROMPT = "Solve it step by step: how many bridges of stone does a small town need?"


def main(folder: Path = HERE) -> None:
    """Write sessions/ into the folder."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1"}
    from vllm import LLM, SamplingParams

    target = folder.resolve() / "sessions"
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)  # the images name the model by its path
        make_model(Path("tiny-model"), Path(os.environ["TORPOR_TEST_MODEL"]))
        llm = LLM(
            "tiny-model", dtype="bfloat16", enforce_eager=True, block_size=32, max_model_len=512, max_num_seqs=4,
            num_gpu_blocks_override=64, gpu_memory_utilization=0.1, seed=0,
            additional_config={"torpor": {"sessions": True, "checkpoint_dir": "sessions"}},
        )  # fmt: skip
        engine = llm.llm_engine
        params = SamplingParams(max_tokens=96, temperature=0.8, seed=0, ignore_eos=True)
        engine.add_request("plan", PROMPT, params)
        for _ in range(14):
            engine.step()
        first = llm.torpor.fork("plan", 2, at=10, seeds=[1, 2], action="a")
        for _ in range(12):
            engine.step()
        second = llm.torpor.fork(first.children[1], 1, at=18, seeds=[3], action="b")
        for _ in range(4):
            engine.step()
        llm.torpor.hibernate(["plan", first.children[0]], "others", to="disk")
        llm.torpor.hibernate([first.children[1], *second.children], "best", to="disk")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree("sessions/images", target / "images", ignore=shutil.ignore_patterns("LOCK"))
    print(f"{target}: {sum(path.stat().st_size for path in target.rglob('*') if path.is_file())} bytes")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
