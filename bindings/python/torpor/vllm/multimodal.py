# SPDX-License-Identifier: Apache-2.0
"""Images, sounds and videos of a request: their processed inputs. What an encoder made of them is computed again."""

from __future__ import annotations

import vllm.envs as envs
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from torpor.errors import Unsupported

_UNSAFE = "images where vLLM may unpickle (VLLM_ALLOW_INSECURE_SERIALIZATION)"
_INLINE = 1 << 62  # bytes: all tensors stand in the one buffer


def to_value(features: list[MultiModalFeatureSpec]) -> bytes | None:
    """As vLLM sends them to its engine core."""
    return bytes(MsgpackEncoder(size_threshold=_INLINE).encode(features)[0]) if features else None


def from_value(value: bytes | None) -> list[MultiModalFeatureSpec]:
    """Raises Unsupported where vLLM would unpickle: the bytes come from a file."""
    if value is None:
        return []
    if envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise Unsupported(_UNSAFE, "start the engine without VLLM_ALLOW_INSECURE_SERIALIZATION")
    return MsgpackDecoder(list[MultiModalFeatureSpec]).decode(value)


def unsupported(features: list[MultiModalFeatureSpec]) -> list[str]:
    """What of them cannot be preserved, by name."""
    if features and envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        return [_UNSAFE]
    if any(f.data is None for f in features):
        return ["inputs of an encoder that are not in this process"]
    # With mm_processor_cache_type="shm" it is a handle until the workers have read what it names.
    return ["images in vLLM's shared memory"] if any("address" in f.data for f in features) else []
