# SPDX-License-Identifier: Apache-2.0
"""Models for vLLM's own tests, in the layout of the Hugging Face hub's cache: hub.py FOLDER TOKENIZER.

vLLM's tests name models of the hub. With HF_HUB_OFFLINE the libraries look in this folder alone, so each name leads to
a tiny random model of the same architecture. Schedulers read only its configuration: what tests of schedulers rely on
(number of positions, tokens of an image) is as in the real model. TOKENIZER: folder of a model with tokenizer.json.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from transformers import (
    BertConfig,
    CLIPVisionConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 49152  # of TOKENIZER
REVISION = "0" * 40
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 1024}
_BERT = {
    "vocab_size": 140000,  # tests name tokens that the tokenizer has not
    "hidden_size": 384,  # tests name the size of an embedding
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}
# What a preprocessor of LLaVA 1.5 does with an image: 336 pixels in patches of 14 are 576 tokens.
_IMAGES = {
    "image_processor_type": "CLIPImageProcessor",
    "crop_size": {"height": 336, "width": 336},
    "size": {"shortest_edge": 336},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 1 / 255,
}
_LLAVA_PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
}


def configurations() -> dict[str, PreTrainedConfig]:
    llama = LlamaConfig(**SMALL, max_position_embeddings=4096)
    return {
        "facebook/opt-125m": OPTConfig(**_OPT),
        "facebook/opt-350m": OPTConfig(**_OPT),
        "intfloat/multilingual-e5-small": BertConfig(**_BERT),
        "BAAI/bge-base-en-v1.5": BertConfig(**_BERT),
        "hmellor/tiny-random-LlamaForCausalLM": llama,
        "meta-llama/Llama-3.2-1B": llama,
        "meta-llama/Llama-3.2-1B-Instruct": llama,
        "JackFram/llama-160m": LlamaConfig(**SMALL, max_position_embeddings=2048),
        "distilbert/distilgpt2": GPT2Config(**_GPT2),
        "openai-community/gpt2": GPT2Config(**_GPT2),
        "google/gemma-3-1b-it": Gemma3TextConfig(**SMALL, head_dim=32, sliding_window=512),
        "Qwen/Qwen1.5-7B": Qwen2Config(**SMALL, max_position_embeddings=32768),
        "jason9693/Qwen2.5-1.5B-apeach": Qwen2Config(
            **SMALL, max_position_embeddings=32768, architectures=["Qwen2ForSequenceClassification"], num_labels=2
        ),
        "Qwen/Qwen3-0.6B": Qwen3Config(**SMALL, head_dim=32, max_position_embeddings=40960),
        "tomaarsen/Qwen3-Reranker-0.6B-seq-cls": Qwen3Config(
            **SMALL,
            head_dim=32,
            max_position_embeddings=40960,
            architectures=["Qwen3ForSequenceClassification"],
            num_labels=1,
        ),
        "llava-hf/llava-1.5-7b-hf": LlavaConfig(
            text_config=llama,
            vision_config=CLIPVisionConfig(
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=336,
                patch_size=14,
                projection_dim=64,
            ),
            image_token_index=5,
        ),
    }


def write(folder: Path, name: str, config: PreTrainedConfig, tokenizer: Path) -> None:
    import torch
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    home = folder / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs/main").write_text(REVISION)
    torch.manual_seed(7)
    kinds = {"llava": AutoModelForImageTextToText, "bert": AutoModel}
    of = kinds.get(config.model_type, AutoModelForCausalLM)
    if any("ForSequenceClassification" in name for name in config.architectures or ()):
        of = AutoModelForSequenceClassification
        config.pad_token_id = config.eos_token_id
    of.from_config(config).save_pretrained(snapshot)
    for file in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / file, snapshot / file)
    words = json.loads((tokenizer / "tokenizer.json").read_text())
    if config.model_type == "llava":
        name_image_token(words, config.image_token_id)
        (snapshot / "preprocessor_config.json").write_text(json.dumps(_IMAGES))
        (snapshot / "processor_config.json").write_text(json.dumps(_LLAVA_PROCESSOR))
    (snapshot / "tokenizer.json").write_text(json.dumps(words))


def name_image_token(words: dict, number: int) -> None:
    """One of the tokenizer's special tokens stands for an image."""
    known = words["model"]["vocab"]
    known.pop(next(word for word, place in known.items() if place == number))
    known["<image>"] = number
    next(added for added in words["added_tokens"] if added["id"] == number)["content"] = "<image>"


if __name__ == "__main__":
    for each, described in configurations().items():
        write(Path(sys.argv[1]), each, described, Path(sys.argv[2]))
