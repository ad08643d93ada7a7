# SPDX-License-Identifier: Apache-2.0
"""Models of the features: the tiny one with what a feature needs beside it, all random."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tiny_model import SPECIAL, VOCABULARY, make_model

sys.path.append(str(Path(__file__).parents[2] / "tools/demo"))

from kinds import write_adapter

ADAPTERS = ("first", "second", "third")


def beside(model: Path, name: str) -> Path:
    """Where what belongs to a model lies."""
    return model.parent / name


def with_adapters(folder: Path, tokenizer_from: Path) -> Path:
    """Three LoRA adapters of the attention's projections, as PEFT writes them."""
    make_model(folder, tokenizer_from)
    for number, name in enumerate(ADAPTERS):
        write_adapter(beside(folder, name), json.loads((folder / "config.json").read_text()), 50 + number, 0.5)
    return folder


def with_draft_model(folder: Path, tokenizer_from: Path) -> Path:
    """The same weights without the last layers: what it drafts is sometimes right."""
    make_model(folder, tokenizer_from)
    draft = beside(folder, "draft")
    shutil.copytree(folder, draft)
    config = json.loads((draft / "config.json").read_text())
    config["num_hidden_layers"] = 1
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:1]
    (draft / "config.json").write_text(json.dumps(config))
    _keep(draft, lambda name: ".layers." not in name or ".layers.0." in name)
    return folder


def with_eagle_head(folder: Path, tokenizer_from: Path) -> Path:
    """A head that drafts from the model's hidden states, made of its first layer."""
    make_model(folder, tokenizer_from)
    head = beside(folder, "eagle")
    head.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, head / name)
    config = json.loads((head / "config.json").read_text())
    config["num_hidden_layers"] = 1
    (head / "config.json").write_text(json.dumps(config))
    layer, hidden = "model.layers.0.", config["hidden_size"]
    tensors = _keep(head, lambda name: name.startswith(layer) and "input_layernorm" not in name)
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    draws = np.random.default_rng(9)
    tensors["fc.weight"] = draws.normal(0, 0.1, (hidden, 2 * hidden)).astype(np.float32)
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_vision(folder: Path, tokenizer_from: Path) -> Path:
    """A tiny Idefics3 with the tokenizer of the tiny model: a picture is 144 tokens, more than a chunk of a prompt."""
    import torch
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessor,
        Idefics3Processor,
    )

    make_model(folder, tokenizer_from)
    text = json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    side, patch, scale = 336, 14, 2
    torch.manual_seed(5)
    config = Idefics3Config(
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": side, "patch_size": patch, "initializer_range": 0.6,
        },
        text_config=text | {"num_hidden_layers": 2, "initializer_range": 0.6},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=scale,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = Idefics3ForConditionalGeneration(config)
    model.get_input_embeddings().weight.data[:SPECIAL] = 0  # these never come
    shutil.rmtree(folder)
    model.save_pretrained(folder)
    edge = {"longest_edge": side}
    images = Idefics3ImageProcessor(size=edge, max_image_size=edge, do_image_splitting=False)
    Idefics3Processor(images, tokenizer, image_seq_len=(side // patch // scale) ** 2).save_pretrained(folder)
    return folder


def _keep(folder: Path, wanted) -> dict[str, np.ndarray]:
    """Leaves only the wanted tensors in a model's file, and returns them."""
    from safetensors.numpy import load_file

    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if wanted(name)}
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


def encoder(folder: Path, tokenizer_from: Path) -> Path:
    """A BERT, which has no KV cache, with the tokenizer of the tiny model."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
    )
    BertModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder
