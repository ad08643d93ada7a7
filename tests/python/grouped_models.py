# SPDX-License-Identifier: Apache-2.0
"""Random tiny models of other kinds than the GPU path's Llama, most with several KV groups: 512 words, quickly made.

`windows` is built as Gemma 3: layers that see the last WINDOW tokens alternate with layers that see all. `sizes` is
built as Gemma 4: the heads of the latter are larger, and so a block has half as many tokens. `states` is built as
Granite 4: Mamba layers, which keep one state, alternate with attention. `convolutions` is built as LFM 2: their state
is the last tokens; vLLM 0.32 on the CPU can keep such states in the prefix cache, and those of Mamba 2 not.
"""

from pathlib import Path

import numpy as np
from gpu_path.model import HEAD, HEADS, HIDDEN, VOCABULARY, embeddings, write

WINDOW = 70  # tokens: not a whole number of blocks
CHUNK = 64
_LARGE_HEAD = 2 * HEAD
_STATE_HEADS, _STATE_SIZE, _CONVOLUTION = 8, 16, 4


def windows(folder: Path, seed: int = 7) -> Path:
    draws = np.random.default_rng(seed)
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    weights = _common(draws)
    for layer in range(len(kinds)):
        # What layers add counts beside the words themselves, which would only repeat.
        norms = {"post_attention_layernorm": 24, "post_feedforward_layernorm": 24, "input_layernorm": 0}
        norms |= {"pre_feedforward_layernorm": 0}
        parts = {f"{name}.weight": np.full(HIDDEN, value, np.float32) for name, value in norms.items()}
        parts |= {f"self_attn.{name}_norm.weight": np.full(HEAD, 0.5, np.float32) for name in "qk"}
        parts |= _attention(draws)
        parts |= {f"mlp.{name}_proj.weight": _drawn(draws, 2 * HIDDEN, HIDDEN) for name in ("gate", "up")}
        parts["mlp.down_proj.weight"] = _drawn(draws, HIDDEN, 2 * HIDDEN)
        weights |= {f"model.layers.{layer}.{name}": content for name, content in parts.items()}
    weights["model.norm.weight"] = np.zeros(HIDDEN, np.float32)  # Gemma's count from one
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": len(kinds), "layer_types": kinds, "sliding_window": WINDOW, "query_pre_attn_scalar": HEAD,
        "rope_parameters": {"sliding_attention": rope, "full_attention": rope},
    }  # fmt: skip
    return write(folder, weights, config)


def sizes(folder: Path, seed: int = 7) -> Path:
    draws = np.random.default_rng(seed)
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    weights = _common(draws)
    for layer, kind in enumerate(kinds):
        head = _LARGE_HEAD if kind == "full_attention" else HEAD
        norms = {"post_attention_layernorm": 25, "post_feedforward_layernorm": 25, "input_layernorm": 1}
        norms |= {"pre_feedforward_layernorm": 1}
        parts = {f"{name}.weight": np.full(HIDDEN, value, np.float32) for name, value in norms.items()}
        parts |= {f"self_attn.{name}_norm.weight": np.full(head, (HEAD / head) ** 0.5, np.float32) for name in "qk"}
        parts |= {f"self_attn.{name}_proj.weight": _drawn(draws, HEADS * head, HIDDEN) for name in "qkv"}
        parts["self_attn.o_proj.weight"] = _drawn(draws, HIDDEN, HEADS * head)
        parts |= {f"mlp.{name}_proj.weight": _drawn(draws, 2 * HIDDEN, HIDDEN) for name in ("gate", "up")}
        parts |= {"mlp.down_proj.weight": _drawn(draws, HIDDEN, 2 * HIDDEN), "layer_scalar": np.ones(1, np.float32)}
        weights |= {f"model.layers.{layer}.{name}": content for name, content in parts.items()}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": len(kinds), "layer_types": kinds, "sliding_window": WINDOW, "head_dim": HEAD,
        "global_head_dim": _LARGE_HEAD, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY,
        "rope_parameters": {"sliding_attention": rope, "full_attention": rope},
    }  # fmt: skip
    return write(folder, weights, config)


def chunks(folder: Path, seed: int = 7) -> Path:
    draws = np.random.default_rng(seed)
    near = [1, 0, 1]  # a layer sees the tokens of its chunk, or all
    weights = _common(draws)
    for layer in range(len(near)):
        parts = {f"{name}_layernorm.weight": np.ones(HIDDEN, np.float32) for name in ("input", "post_attention")}
        parts |= _attention(draws)
        parts |= {f"feed_forward.{name}_proj.weight": _drawn(draws, 2 * HIDDEN, HIDDEN) for name in ("gate", "up")}
        parts["feed_forward.down_proj.weight"] = _drawn(draws, HIDDEN, 2 * HIDDEN)
        weights |= {f"model.layers.{layer}.{name}": content for name, content in parts.items()}
    config = {
        "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "num_hidden_layers": len(near),
        "no_rope_layers": near, "attention_chunk_size": CHUNK, "intermediate_size_mlp": 2 * HIDDEN,
        "interleave_moe_layer_step": 0, "moe_layers": [], "attn_temperature_tuning": False,
    }  # fmt: skip
    return write(folder, weights, config)


def states(folder: Path, seed: int = 7) -> Path:
    draws = np.random.default_rng(seed)
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    inner = 2 * HIDDEN
    convolved = inner + 2 * _STATE_SIZE
    weights = _common(draws)
    for layer, kind in enumerate(kinds):
        ones = np.ones(HIDDEN, np.float32)
        parts = {"input_layernorm.weight": ones, "post_attention_layernorm.weight": ones}
        parts["shared_mlp.input_linear.weight"] = _drawn(draws, 4 * HIDDEN, HIDDEN)
        parts["shared_mlp.output_linear.weight"] = _drawn(draws, HIDDEN, 2 * HIDDEN)
        if kind == "full_attention":
            parts |= _attention(draws)
        else:
            decay = np.log(draws.uniform(0.02, 0.2, _STATE_HEADS)).astype(np.float32)  # a state forgets slowly
            parts |= {
                "mamba.in_proj.weight": _drawn(draws, inner + convolved + _STATE_HEADS, HIDDEN) / 4,
                "mamba.conv1d.weight": _drawn(draws, convolved, _CONVOLUTION)[:, None],
                "mamba.conv1d.bias": _drawn(draws, 1, convolved)[0],
                "mamba.A_log": decay, "mamba.D": np.ones(_STATE_HEADS, np.float32),
                "mamba.dt_bias": _drawn(draws, 1, _STATE_HEADS)[0], "mamba.norm.weight": np.ones(inner, np.float32),
                "mamba.out_proj.weight": _drawn(draws, HIDDEN, inner),
            }  # fmt: skip
        weights |= {f"model.layers.{layer}.{name}": content for name, content in parts.items()}
    config = {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "layer_types": kinds,
        "num_hidden_layers": len(kinds), "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 2 * HIDDEN, "attention_multiplier": HEAD**-0.5, "position_embedding_type": None,
        "mamba_n_heads": _STATE_HEADS, "mamba_d_head": inner // _STATE_HEADS, "mamba_d_state": _STATE_SIZE,
        "mamba_d_conv": _CONVOLUTION, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 4096,
    }  # fmt: skip
    return write(folder, weights, config)


def convolutions(folder: Path, seed: int = 7) -> Path:
    draws = np.random.default_rng(seed)
    kinds = ["conv", "full_attention", "conv"]
    weights = _common(draws)
    weights["model.embedding_norm.weight"] = weights.pop("model.norm.weight")
    for layer, kind in enumerate(kinds):
        parts = {f"{name}_norm.weight": np.ones(HIDDEN, np.float32) for name in ("operator", "ffn")}
        parts |= {f"feed_forward.{name}.weight": _drawn(draws, 2 * HIDDEN, HIDDEN) for name in ("w1", "w3")}
        parts["feed_forward.w2.weight"] = _drawn(draws, HIDDEN, 2 * HIDDEN)
        if kind == "full_attention":
            parts |= {name.replace("o_proj", "out_proj"): content for name, content in _attention(draws).items()}
            # All tokens count alike: how the CPU's kernel rotates queries of this shape depends on the batch's size.
            parts["self_attn.q_layernorm.weight"] = np.zeros(HEAD, np.float32)
            parts["self_attn.k_layernorm.weight"] = np.ones(HEAD, np.float32)
        else:
            parts["conv.in_proj.weight"] = _drawn(draws, 3 * HIDDEN, HIDDEN) / 4
            parts["conv.conv.weight"] = _drawn(draws, HIDDEN, _CONVOLUTION)[:, None]
            parts["conv.out_proj.weight"] = _drawn(draws, HIDDEN, HIDDEN)
        weights |= {f"model.layers.{layer}.{name}": content for name, content in parts.items()}
    config = {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "layer_types": kinds,
        "num_hidden_layers": len(kinds), "conv_L_cache": _CONVOLUTION, "conv_dim": HIDDEN, "block_dim": HIDDEN,
        "block_auto_adjust_ff_dim": False,
    }  # fmt: skip
    return write(folder, weights, config)


def experts(folder: Path, seed: int = 7) -> Path:
    """Mixtral: each token goes through two of four experts. One KV group."""
    draws = np.random.default_rng(seed)
    layers, count = 2, 4
    weights = _common(draws)
    for layer in range(layers):
        parts = {f"{name}_layernorm.weight": np.ones(HIDDEN, np.float32) for name in ("input", "post_attention")}
        parts |= _attention(draws)
        parts["block_sparse_moe.gate.weight"] = _drawn(draws, count, HIDDEN)
        for number in range(count):
            expert = f"block_sparse_moe.experts.{number}"
            parts |= {f"{expert}.{name}.weight": _drawn(draws, HIDDEN, HIDDEN) for name in ("w1", "w2", "w3")}
        weights |= {f"model.layers.{layer}.{name}": content for name, content in parts.items()}
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_hidden_layers": layers,
        "intermediate_size": HIDDEN, "num_local_experts": count, "num_experts_per_tok": 2,
    }  # fmt: skip
    return write(folder, weights, config)


def _common(draws) -> dict[str, np.ndarray]:
    return {"model.embed_tokens.weight": embeddings(draws), "model.norm.weight": np.ones(HIDDEN, np.float32)}


def _attention(draws) -> dict[str, np.ndarray]:
    return {f"self_attn.{name}_proj.weight": _drawn(draws, HEADS * HEAD, HIDDEN) for name in "qkvo"}


def _drawn(draws, rows: int, columns: int) -> np.ndarray:
    return draws.normal(0, 0.6, (rows, columns)).astype(np.float32)


MODELS = {
    "windows": windows, "sizes": sizes, "chunks": chunks, "states": states, "convolutions": convolutions,
    "experts": experts,
}  # fmt: skip
