#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes examples/checkpoints: two checkpoints of a vLLM engine with a tiny random model, to look into without one.

    tools/dev python examples/make_checkpoints.py [DIRECTORY]

Three chats that share a prompt and one that does not, with a batch of three: so one waits. The first checkpoint is
taken after a few steps, the second after some more. A new run makes other ids, dates and digests: tools/dev reference
then writes the page that shows them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOKENS = 1024  # of the tokenizer: the first ones of the demo's model
STEPS = (6, 20)  # of the engine, before each of the checkpoints
SHARED = "You are the assistant of a small library. Answer in one sentence, and name a book if you know one. "
CHATS = (
    ("chat1", SHARED + "Who wrote about whales?"),
    ("chat2", SHARED + "I would like to read about bridges."),
    ("chat3", SHARED + "What is good for a long journey by train?"),
    ("poem", "Write a poem about the sea at night."),
)


def make_model(folder: Path, tokenizer_from: Path) -> Path:
    """Write a random Llama of two layers, hidden size 32, and its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        initializer_range=0.6, bos_token_id=1, eos_token_id=2, torch_dtype=torch.bfloat16,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.model.embed_tokens.weight.data[:17] = 0  # special tokens do not come, so answers go on
    model.save_pretrained(folder)
    tokenizer = json.loads((tokenizer_from / "tokenizer.json").read_text())
    words = tokenizer["model"]
    words["vocab"] = {token: number for token, number in words["vocab"].items() if number < TOKENS}
    words["merges"] = [pair for pair in words["merges"] if {*pair, "".join(pair)} <= words["vocab"].keys()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


def main(folder: Path = HERE) -> None:
    """Write tokenizer.json and checkpoints/ into the folder."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1"}
    from vllm import LLM, SamplingParams

    target = folder.resolve() / "checkpoints"
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)  # the checkpoints name the model by its path
        make_model(Path("tiny-model"), Path(os.environ["TORPOR_TEST_MODEL"]))
        shutil.copy("tiny-model/tokenizer.json", target.parent / "tokenizer.json")
        llm = LLM(
            "tiny-model", dtype="bfloat16", enforce_eager=True, block_size=32, max_model_len=512, max_num_seqs=3,
            num_gpu_blocks_override=64, gpu_memory_utilization=0.1, seed=0,
            additional_config={"torpor": {"checkpoint_dir": "checkpoints", "retain_checkpoints": len(STEPS)}},
        )  # fmt: skip
        engine = llm.llm_engine
        for name, prompt in CHATS:
            engine.add_request(name, prompt, SamplingParams(max_tokens=64, temperature=0.8, ignore_eos=True))
        engine_steps = 0
        for steps in STEPS:
            for _ in range(steps):
                engine.step()
            llm.checkpoint(metadata={"steps": str(engine_steps := engine_steps + steps)})
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for made in sorted(Path("checkpoints").glob("g-*")):
            shutil.copytree(made, target / made.name)
    print(f"{target}: {sum(path.stat().st_size for path in target.rglob('*') if path.is_file())} bytes")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
