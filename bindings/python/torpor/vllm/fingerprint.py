# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of an engine: what its tokens depend on besides the bytes of the weights. A wake compares it field by
field. Some fields may differ: checkpoint/engine_checkpoint.h."""

from __future__ import annotations

import functools
import json
import os
from importlib import metadata
from pathlib import Path

import torch
import vllm
from vllm.transformers_utils.repo_utils import try_get_local_file
from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from torpor import _core
from torpor.vllm import connector_groups, kv_layout
from torpor.vllm.options import Options
from torpor.vllm.support import base_of, rank_of


# Both are asked for while an engine stands still, and take milliseconds.
_transformers_version = functools.cache(lambda: metadata.version("transformers"))
_digests: dict[int, tuple[object, str]] = {}  # by id of a configuration, which is kept: the id stays its own


def _digest_of(config) -> str:
    """Of a model's configuration, as it was when it was asked for first: its weights are loaded by then."""
    if id(config) not in _digests:
        _digests[id(config)] = (config, _core.digest(config.to_json_string().encode()))
    return _digests[id(config)][1]


def of_weights(vllm_config, options: Options) -> dict[str, str]:
    """What decides how weights lie in memory, and which they are but for their bytes: known before they are loaded."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    fields = {
        "vllm_version": vllm.__version__,
        "torch_version": torch.__version__,
        "transformers_version": _transformers_version(),
        "model_config": _digest_of(model.hf_config),
        "architecture": ",".join(model.hf_config.architectures or []),
        "dtype": model.dtype,
        "quantization": model.quantization,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "cpu_linear": options.cpu_linear,
    }
    return {name: str(value) for name, value in fields.items()}


# What a model's own files say of how images, sounds and videos become an encoder's input.
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def _of_encoder_inputs(model) -> dict[str, str]:
    """Return a digest of what decides about the KV of images, sounds and videos besides content and request.
    Nothing for a model that takes none."""
    if (config := getattr(model, "multimodal_config", None)) is None:
        return {}
    if id(config) not in _digests:
        scales = getattr(config, "mm_encoder_fp8_scale_path", None)
        parts = {
            "kwargs": config.mm_processor_kwargs,
            "pruning": [config.video_pruning_rate, getattr(config, "video_pruning_method", None)],
            "encoder": [
                getattr(config, "mm_encoder_attn_dtype", None),
                None if scales is None else _core.digest(Path(scales).read_bytes()),
            ],
            "files": {name: _processor_file(model, name) for name in _PROCESSOR_FILES},
        }
        described = json.dumps(parts, sort_keys=True, default=str)
        _digests[id(config)] = (config, _core.digest(described.encode()))
    return {"multimodal_inputs": _digests[id(config)][1]}


def _processor_file(model, name: str) -> object:
    """Return the content of a file of the model's, or None. vLLM has put it on the local disk by now."""
    path = try_get_local_file(model=model.model, file_name=name, revision=model.revision)
    if not isinstance(path, Path):
        return None
    text = path.read_bytes()
    try:
        return json.loads(text)
    except ValueError:
        return _core.digest(text)


def kv_namespace(worker) -> str:
    """Return what the bytes of a rank's KV blocks depend on, besides its weights and what keys of blocks contain; and
    how keys are made. Keep the result: while an engine starts, vLLM has another seed of hashes than later.
    """
    config, runner = worker.vllm_config, worker.model_runner
    cache = config.cache_config
    fields = (
        of_weights(config, Options.of(config))
        | {
            "rank": rank_of(worker),
            "max_model_len": config.model_config.max_model_len,
            "kv_cache_dtype": cache.cache_dtype,
            "block_size": cache.block_size,
            "prefix_hash": f"{cache.prefix_caching_hash_algo}, seed {get_none_hash_seed()}",
            "layers": kv_layout.layers(runner.kv_cache_config),
            "layout": runner.kv_cache_config.kv_cache_layout,
        }
        | kv_layout.packing(config)
        | _of_encoder_inputs(config.model_config)
    )
    if (groups := connector_groups.describe(runner.kv_cache_config)) is not None:
        fields["groups"] = groups
    if (drafter := _drafting_model(config.speculative_config)) is not None:
        fields["drafting_model"] = drafter
    return "\n".join(f"{name}: {value}" for name, value in fields.items())


def fingerprint(vllm_config, scheduler, workers: list[dict]) -> dict[str, str]:
    model, cache, parallel, scheduling = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
        vllm_config.scheduler_config,
    )
    hash_algorithm, hash_seed = cache.prefix_caching_hash_algo, get_none_hash_seed()
    if "xxhash" in hash_algorithm:  # collisions can be made by those who know the seed
        hash_seed = _core.digest(hash_seed.encode())
    fields = of_weights(vllm_config, Options.of(vllm_config)) | {
        "max_model_len": model.max_model_len,
        "kv_cache_dtype": cache.cache_dtype,
        "kv_num_blocks": scheduler.kv_cache_config.num_blocks,
        "kv_block_sizes": ",".join(str(g.kv_cache_spec.block_size) for g in scheduler.kv_cache_config.kv_cache_groups),
        "kv_layout": " | ".join(dict.fromkeys(w["kv_layout"] for w in workers)),
        "prefix_caching": cache.enable_prefix_caching,
        "prefix_hash": f"{hash_algorithm}, seed {hash_seed}",
        "scheduling_policy": scheduling.policy,
        "max_num_seqs": scheduling.max_num_seqs,
        "max_num_batched_tokens": scheduling.max_num_batched_tokens,
        "chunked_prefill": scheduling.enable_chunked_prefill,
        "compilation": f"{vllm_config.compilation_config.mode}",
        "threads": ",".join(str(w["threads"]) for w in workers),
        "model_runner": ",".join(sorted({w["runner"] + (" V2" if w["v2"] else "") for w in workers})),
    }
    if any(isinstance(g.kv_cache_spec, UniformTypeKVCacheSpecs) for g in scheduler.kv_cache_config.kv_cache_groups):
        # Its layers have blocks of several kinds: which layer has which is not in kv_layout.
        fields["kv_layers"] = _core.digest("|".join(w["layers"] for w in workers).encode())
    if parallel.pipeline_parallel_size > 1:
        fields["pipeline_stages"] = _core.digest("|".join(w["layers"] for w in workers).encode())
    if model.use_fp64_gumbel:
        fields["noise"] = "fp64"
    fields |= _of_encoder_inputs(model) | _of_structured_outputs(vllm_config)
    if model.logprobs_mode != "raw_logprobs":
        fields["logprobs_mode"] = model.logprobs_mode
    if model.runner_type != "generate":
        fields["runner_type"] = f"{model.runner_type}, {model.convert_type}"
    if (speculation := vllm_config.speculative_config) is not None:
        fields["speculation"] = _speculation(speculation)
    if (lora := vllm_config.lora_config) is not None:
        fields["lora"] = f"{lora.max_loras} of rank {lora.max_lora_rank}, {lora.lora_dtype}"
    if (scheduler_class := base_of(scheduler)) is not Scheduler:
        fields["scheduler"] = scheduler_class.__name__
    fields |= _of_groups(scheduler, cache)
    for of_workers in ("device", "attention"):
        for name in sorted({name for w in workers for name in w[of_workers]}):
            fields[name] = ",".join(sorted({w[of_workers].get(name, "nothing") for w in workers}))
    return {name: str(value) for name, value in fields.items()}


def _of_structured_outputs(vllm_config) -> dict[str, str]:
    """Return what decides where reasoning ends, from where on a grammar holds, and which tokens it takes. Only what is
    not vLLM's default: checkpoints of engines with the defaults have none of these."""
    structured, reasoning = vllm_config.structured_outputs_config, vllm_config.reasoning_config
    fields: dict[str, str] = {}
    if structured.reasoning_parser:
        fields["reasoning_parser"] = structured.reasoning_parser
    switches = ("enable_in_reasoning", "disable_any_whitespace", "disable_additional_properties")
    if switched_on := [name for name in switches if getattr(structured, name)]:
        fields["structured_outputs"] = ", ".join(switched_on)
    if reasoning is not None and reasoning.enabled:  # else no request has a thinking budget
        begin, end, forced = (
            reasoning.reasoning_start_token_ids,
            reasoning.natural_reasoning_end_token_ids,
            reasoning.reasoning_end_token_ids,
        )
        fields["reasoning_tokens"] = f"begins with {begin}, ends with {end}, is ended with {forced}"
    return fields


def _of_groups(scheduler, cache) -> dict:
    """Only of engines with more than full attention: checkpoints of others have none of these."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    if [type(manager) for manager in managers] == [FullAttentionManager]:
        return {}
    kinds = zip(managers, groups, strict=True)
    fields = {
        "kv_groups": ",".join(f"{type(manager).__name__} of {len(group.layer_names)}" for manager, group in kinds),
        "prefix_hash_tokens": scheduler.hash_block_size,
        "prefix_retention": scheduler.kv_cache_config.prefix_cache_retention_interval,
    }
    if scheduler.has_mamba_layers:
        fields["mamba_cache"] = f"{cache.mamba_cache_mode}, {cache.mamba_cache_dtype}, {cache.mamba_ssm_cache_dtype}"
        if (layout := os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT", "SD")) != "SD":  # as vLLM reads it
            fields["mamba_cache"] += f", {layout}"
    return fields


def _drafting_model(speculation) -> str | None:
    """The method of vLLM's SpeculativeConfig, and the model's configuration by digest; None: no model drafts."""
    if speculation is None or getattr(speculation, "draft_model_config", None) is None or "ngram" in speculation.method:
        return None
    return f"{speculation.method}, {_digest_of(speculation.draft_model_config.hf_config)}"


def _speculation(config) -> str:
    """How tokens are drafted, and by which model: its configuration by digest."""
    drafter = getattr(config, "draft_model_config", None)
    words = [config.method, str(config.num_speculative_tokens), str(config.draft_sample_method)]
    words += [f"{config.prompt_lookup_min} to {config.prompt_lookup_max}"] if "ngram" in config.method else []
    words += [_digest_of(drafter.hf_config)] if drafter is not None else []
    if (method := config.rejection_sample_method) != "standard":
        words += [method]
    if method == "synthetic":
        words += [f"rates {config.synthetic_acceptance_rates}", f"length {config.synthetic_acceptance_length}"]
    if (by_size := config.num_speculative_tokens_per_batch_size) is not None:
        words += [f"{by_size} by batch size"]
    return ", ".join(words)
