# SPDX-License-Identifier: Apache-2.0
"""What `tools/dev demo --features` shows: one request of each kind, in one engine that has all of it switched on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANK = 4
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "trade": {"enum": ["clock maker", "baker", "sailor"]},
    },
    "required": ["name", "age", "trade"],
    "additionalProperties": False,
}

# Kind, prompt, sampling parameters, and the grammar that its answer follows.
_REQUESTS = (
    ("greedy", "Tell me of a town by the sea.", {"temperature": 0}, None),
    ("seeded", "Tell me of an old clock maker.", {"temperature": 0.8, "seed": 7}, None),
    ("JSON schema", "Describe a person as JSON.", {"temperature": 0.8, "seed": 11}, {"json": _SCHEMA}),
    (
        "regular expression",
        "Give me a phone number.",
        {"temperature": 0.8, "seed": 12},
        {"regex": r"(\d{2} ){8,12}\d{4}"},
    ),
    (
        "choice",
        "How does it end?",
        {"temperature": 0},
        {"choice": [f"{what} and was never seen again by anybody in that town" for what in ("He left", "She sailed")]},
    ),
    ("LoRA adapter", "Tell me of a town by the sea.", {"temperature": 0}, None),
    ("LoRA adapter, seeded", "Tell me of an old clock maker.", {"temperature": 0.8, "seed": 13}, None),
)


def write_adapter(folder: Path, model: dict, seed: int, deviation: float) -> None:
    """A random LoRA adapter of the attention's projections, as PEFT writes it. `model`: its config.json."""
    draws = np.random.default_rng(seed)
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    width = heads * (model.get("head_dim") or hidden // heads)
    tensors = {}
    for layer in range(model["num_hidden_layers"]):
        for projection, rows, columns in (("q_proj", width, hidden), ("o_proj", hidden, width)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            tensors[f"{name}.lora_A.weight"] = draws.normal(0, deviation, (RANK, columns)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = draws.normal(0, deviation, (rows, RANK)).astype(np.float32)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def shown(gpu_path: bool) -> list[tuple]:
    """On vLLM's GPU path all are drafted by n-grams, and none has an adapter: on CPU tensors vLLM has one or the other.

    On the CPU there are no drafts: with them vLLM samples otherwise in each run.
    """
    return [request for request in _REQUESTS if not (gpu_path and request[0].startswith("LoRA"))]


def options(model: str, directory: str, gpu_path: bool) -> dict:
    """Of the engine."""
    features = {
        "prefix_caching_hash_algo": "xxhash",
        "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},
        "structured_outputs_config": {"backend": "xgrammar"},
    }
    if gpu_path:
        drafts = {"num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
        return features | {"speculative_config": {"method": "ngram_gpu"} | drafts}
    adapter = Path(directory) / "adapter"
    if not adapter.exists():
        write_adapter(adapter, json.loads((Path(model) / "config.json").read_text()), 1, 0.06)
    return features | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def requests(directory: str, max_tokens: int, gpu_path: bool) -> list[tuple]:
    """Kind, prompt, SamplingParams and further arguments of add_request()."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    adapter = LoRARequest("adapter", 1, str(Path(directory) / "adapter"))
    return [
        (
            kind,
            prompt,
            SamplingParams(
                max_tokens=max_tokens,
                structured_outputs=None if grammar is None else StructuredOutputsParams(**grammar),
                **sampling,
            ),
            {"lora_request": adapter} if kind.startswith("LoRA") else {},
        )
        for kind, prompt, sampling, grammar in shown(gpu_path)
    ]
