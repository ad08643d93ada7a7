# SPDX-License-Identifier: Apache-2.0
"""A random tiny Llama with a tokenizer of 2,048 tokens, made on the spot: fast enough for wide test matrices."""

import json
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "gpu_path"))  # it is a script too

import gpu_path
from gpu_path import model as gpu_path_model
from zygote import shared

VOCABULARY = 2048
SPECIAL = 17  # its first tokens
# What some of them are called; on the GPU path they have other numbers, see gpu_path/model.py.
NAMED = {
    "<think>": 5, "</think>": 6, "<image>": 7, "<fake_token_around_image>": 8,
    "<end_of_utterance>": 9, "<global-img>": 10,
}  # fmt: skip


def make_model(folder: Path, tokenizer_from: Path, seed: int = 7, layers: int = 4) -> Path:
    """The same as make_tiny_llama(), by the zygote where this process lacks torch; on the GPU path, its model."""
    if gpu_path.active():
        return gpu_path_model.make_model(folder, seed)
    if "torch" in sys.modules:
        return make_tiny_llama(folder, tokenizer_from, seed, layers)
    done = shared().run([__file__, folder, tokenizer_from, seed, layers])
    assert done.returncode == 0, done.stderr
    return folder


def make_tiny_llama(folder: Path, tokenizer_from: Path, seed: int = 7, layers: int = 4) -> Path:
    """Writes a Llama of `layers` layers, hidden size 128.

    Its tokenizer is the one in `tokenizer_from`, cut to its first tokens.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.6,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    # Special tokens never come, so answers have the length asked for.
    model.model.embed_tokens.weight.data[:SPECIAL] = 0
    model.save_pretrained(folder)
    _write_tokenizer(folder / "tokenizer.json", json.loads((tokenizer_from / "tokenizer.json").read_text()))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


def _write_tokenizer(path: Path, tokenizer: dict) -> None:
    """The first tokens of a byte-level BPE: special ones, bytes, then what the first merges make."""
    model = tokenizer["model"]
    kept = {token: number for token, number in model["vocab"].items() if number < VOCABULARY}
    model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= kept.keys()]
    model["vocab"] = kept
    for token, number in NAMED.items():
        kept.pop(next(known for known, place in kept.items() if place == number))
        kept[token] = number
        next(added for added in tokenizer["added_tokens"] if added["id"] == number)["content"] = token
    path.write_text(json.dumps(tokenizer))


if __name__ == "__main__":
    make_tiny_llama(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
