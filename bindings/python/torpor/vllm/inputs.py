# SPDX-License-Identifier: Apache-2.0
"""What the prompt of a request has besides tokens: images and the like (multimodal.py), and embeddings.

Embeddings stand in the place of tokens, of all or of some: a tensor of the request's own, which nothing could compute
again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec

from torpor.vllm import multimodal
from torpor.vllm.values import tensor_from_value, tensor_to_value


@dataclass
class Embeddings:
    tensor: torch.Tensor
    is_token: list[bool] | None  # by position, where a prompt mixes both
    beside_tokens: bool  # False: the prompt has no token ids


@dataclass
class Inputs:
    features: list[MultiModalFeatureSpec] = field(default_factory=list)
    embeddings: Embeddings | None = None

    @staticmethod
    def of(request) -> Inputs:
        """Of a Request or an EngineCoreRequest."""
        embeddings = None
        if request.prompt_embeds is not None:
            beside_tokens = request.prompt_token_ids is not None
            embeddings = Embeddings(request.prompt_embeds, request.prompt_is_token_ids, beside_tokens)
        return Inputs(request.mm_features, embeddings)

    def __bool__(self) -> bool:
        return bool(self.features) or self.embeddings is not None

    def arguments(self, prompt_token_ids: list[int]) -> dict:
        """Of the prompt, by the names that all of vLLM's kinds of requests have for it."""
        arguments: dict[str, Any] = {"prompt_token_ids": prompt_token_ids, "mm_features": self.features}
        if (embeddings := self.embeddings) is None:
            return arguments
        if not embeddings.beside_tokens:
            arguments["prompt_token_ids"] = None
        return arguments | {"prompt_embeds": embeddings.tensor, "prompt_is_token_ids": embeddings.is_token}

    def to_value(self) -> dict:
        return {
            "features": multimodal.to_value(self.features),
            "embeddings": None if self.embeddings is None else _to_value(self.embeddings),
        }

    @staticmethod
    def from_value(value: dict) -> Inputs:
        """Older checkpoints have none of it. Raises KeyError or ValueError for what to_value() cannot have made."""
        embeddings = value.get("embeddings")
        return Inputs(
            multimodal.from_value(value.get("features")), None if embeddings is None else _from_value(embeddings)
        )


def token_ids(request) -> list[int]:
    """Those of the prompt of any kind of request; zeros, as vLLM has them, where it has none."""
    if request.prompt_token_ids is None:
        return [0] * len(request.prompt_embeds)
    return list(request.prompt_token_ids)


def _to_value(embeddings: Embeddings) -> dict:
    mask = embeddings.is_token
    return {
        "tensor": tensor_to_value(embeddings.tensor),
        "is_token": None if mask is None else bytes(mask),
        "beside_tokens": embeddings.beside_tokens,
    }


def _from_value(value: dict) -> Embeddings:
    mask = value["is_token"]
    return Embeddings(
        tensor_from_value(value["tensor"]),
        None if mask is None else [bool(position) for position in mask],
        value["beside_tokens"],
    )
