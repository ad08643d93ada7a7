# SPDX-License-Identifier: Apache-2.0
"""A random Llama of 512 words and its byte-level tokenizer, written in a moment: needs neither torch nor a model.

Its answers are no sentences, but text: whatever it samples is a printable character or the beginning of a word.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 512
SPECIAL = (
    "<pad>", "<s>", "</s>", "<think>", "</think>", "<image>", "<fake_token_around_image>", "<end_of_utterance>",
    "<global-img>",
)  # fmt: skip
HIDDEN, HEADS, HEAD = 128, 2, 64

# Each beginning of a word is a token, until the vocabulary is full.
_WORDS = (
    "the and that there then they a an as at of on one in is it to two three town foo bar la once upon time said she "
    "he had her his have who what when where with was were would by be but been old clock maker sea small lived never "
    "late for from anything capital"
).split()


def make_model(folder: Path, seed: int = 7, layers: int = 2) -> Path:
    """Writes model and tokenizer into `folder`."""
    return write(folder, _weights(seed, layers), {"num_hidden_layers": layers})


def write(folder: Path, weights: dict[str, np.ndarray], config: dict) -> Path:
    """A model with these weights and this tokenizer; `config`: what differs from the Llama's."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in _descriptions(*_tokens(), config).items():
        (folder / name).write_text(json.dumps(content))
    return folder


def embeddings(draws: np.random.Generator) -> np.ndarray:
    """Words and logits have the same vectors: with zeros a token never comes.

    So answers have the length asked for, and are text.
    """
    vocabulary, _ = _tokens()
    vectors = draws.normal(0, 0.6, (VOCABULARY, HIDDEN)).astype(np.float32)
    letters = {character for byte, character in _bytes().items() if ord(" ") <= byte <= ord("~")}
    for token, number in vocabulary.items():
        if token in SPECIAL or not letters.issuperset(token):
            vectors[number] = 0
    return vectors


def _bytes() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary, as GPT-2 has it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def _tokens() -> tuple[dict[str, int], list[list[str]]]:
    """Special tokens, bytes, beginnings of words; and the merges that lead to these, in this order."""
    of_byte = _bytes()
    tokens = [*SPECIAL, *(of_byte[byte] for byte in range(256))]
    known, merges = set(tokens), []
    for word in _WORDS:
        for spelled in (of_byte[ord(" ")] + word, word):
            for end in range(2, len(spelled) + 1):
                if spelled[:end] not in known and len(tokens) < VOCABULARY:
                    known.add(spelled[:end])
                    tokens.append(spelled[:end])
                    merges.append([spelled[: end - 1], spelled[end - 1]])
    assert len(tokens) == VOCABULARY, f"the words make {len(tokens)} tokens"
    return {token: number for number, token in enumerate(tokens)}, merges


def _weights(seed: int, layers: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)

    def drawn(rows: int, columns: int) -> np.ndarray:
        return draws.normal(0, 0.6, (rows, columns)).astype(np.float32)

    def ones() -> np.ndarray:
        return np.ones(HIDDEN, np.float32)

    weights = {"model.embed_tokens.weight": embeddings(draws), "model.norm.weight": ones()}
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, HIDDEN),
        "self_attn.v_proj": (HIDDEN, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (2 * HIDDEN, HIDDEN), "mlp.up_proj": (2 * HIDDEN, HIDDEN),
        "mlp.down_proj": (HIDDEN, 2 * HIDDEN),
    }  # fmt: skip
    for layer in range(layers):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = drawn(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = ones()
    return weights


def _descriptions(vocabulary: dict[str, int], merges: list[list[str]], config: dict) -> dict[str, dict]:
    """What stands beside the weights, by file."""
    pad, begin, end, *_ = SPECIAL
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
            "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN,
            "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "tie_word_embeddings": True,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        } | config,
        "tokenizer.json": {
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
            "added_tokens": [{"id": i, "content": token} | flags for i, token in enumerate(SPECIAL)],
            "pre_tokenizer": byte_level, "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096,
            "pad_token": pad, "bos_token": begin, "eos_token": end,
            "chat_template": "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
        },
    }  # fmt: skip
