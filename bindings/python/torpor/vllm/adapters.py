# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: requests name one, workers hold its weights. A new process loads it again; it must be the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.lora.request import LoRARequest

from torpor import _core

if TYPE_CHECKING:  # it imports all that computes with adapters
    from vllm.lora.lora_model import LoRAModel

_FIELDS = ("lora_name", "lora_int_id", "lora_path", "base_model_name", "load_inplace", "is_3d_lora_weight")


def to_value(request: LoRARequest | None) -> dict | None:
    """Which adapter a request names, by the names of vLLM's fields."""
    return None if request is None else {name: getattr(request, name) for name in _FIELDS}


def from_value(value: dict | None) -> LoRARequest | None:
    return None if value is None else LoRARequest(**value)


def digest(adapter: LoRAModel) -> str:
    """Of all weights of an adapter as they were read from its files, before a rank takes its share of them."""
    parts = [f"rank {adapter.rank}"]
    for kind, modules in (("lora", adapter.loras), ("whole", adapter.modules_to_save)):
        for name in sorted(modules):
            fields = vars(modules[name])
            for field in sorted(fields):
                parts.append(f"{kind} {name} {field} {_described(fields[field])}")
    return _core.digest("\n".join(parts).encode())


def _described(item) -> str:
    if isinstance(item, torch.Tensor):
        content = item.detach().cpu().contiguous().view(torch.uint8).numpy()
        return f"{item.dtype} {list(item.shape)} {_core.digest(content.tobytes())}"
    if isinstance(item, (list, tuple)):
        return f"[{', '.join(_described(each) for each in item)}]"
    return str(item)


def remember_digests(runner) -> None:
    """Each adapter that this worker reads from now on is known by its digest, taken before vLLM changes it in place."""
    if (manager := getattr(runner, "lora_manager", None)) is None:
        return
    stock = manager._load_adapter

    def load_adapter(lora_request: LoRARequest) -> LoRAModel:
        adapter = stock(lora_request)
        adapter.torpor_digest = digest(adapter)
        manager.torpor_read += 1
        return adapter

    manager._load_adapter = load_adapter
    manager.torpor_read = 0


def times_read(runner) -> int:
    """How many adapters this worker has read so far."""
    return getattr(getattr(runner, "lora_manager", None), "torpor_read", 0)


def read(runner, adapter: dict) -> None:
    """Read an adapter, of to_value(), unless the worker holds it; no slot gets it before vLLM computes with it.

    So it can be called in the middle of a step. As in vLLM it takes the place of the least recently used one.
    """
    manager, request = runner.lora_manager, LoRARequest(**adapter)
    if request.lora_int_id in manager.list_adapters():
        return
    loaded, cache = manager._load_adapter(request), manager._adapter_manager
    if len(cache) + 1 > cache.capacity:
        cache.remove_oldest_adapter()
    cache.add_adapter(loaded)


def loaded(runner) -> list[dict]:
    """Adapters that a worker holds, the least recently used first: `id` and `digest` of each."""
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        return []
    return [
        {"id": number, "digest": getattr(adapter, "torpor_digest", None)}
        for number, adapter in manager._adapter_manager.list_adapters().items()
    ]


def load(runner, adapter: dict, expected: str | None) -> str | None:
    """Loads an adapter, of to_value(), unless the worker holds it. Returns why it cannot be used, or None.

    expected: its digest; None: any. An adapter that is another one is not kept.
    """
    name, number = adapter["lora_name"], adapter["lora_int_id"]
    if getattr(runner, "lora_manager", None) is None:
        return f"its LoRA adapter {name} cannot be loaded: this engine runs without LoRA"
    held = number in runner.list_loras()
    try:
        runner.add_lora(from_value(adapter))
    except Exception as problem:
        return f"its LoRA adapter {name} cannot be loaded from {adapter['lora_path']}: {problem}"
    found = {each["id"]: each["digest"] for each in loaded(runner)}.get(number)
    if expected is None or found == expected:
        return None
    if held:
        return f"its LoRA adapter {name} has the number {number}, which is another adapter's in this engine"
    runner.remove_lora(number)
    return f"its LoRA adapter {name} in {adapter['lora_path']} is not the one that it began with"


def slots(runner) -> list[int | None]:
    """The number of the adapter in each slot of a worker."""
    manager = getattr(runner, "lora_manager", None)
    return [] if manager is None else list(manager._adapter_manager.lora_index_to_id)


def place(runner, wanted: list[int | None]) -> None:
    """Copies adapters that the worker holds into these slots; others are free afterwards.

    vLLM takes the first free slot, so the others look taken meanwhile. The order matters on the CPU: there a request
    without an adapter computes with what lies in the last slot.
    """
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        return
    manager, taken = manager._adapter_manager, 0  # no adapter has the number 0
    for number in filter(None, list(manager.lora_index_to_id)):
        manager.deactivate_adapter(number)
    held = manager.list_adapters()
    manager.lora_index_to_id = [taken] * manager.lora_slots
    for slot, number in enumerate(wanted[: manager.lora_slots]):
        if number in held:
            manager.lora_index_to_id[slot] = None
            manager.activate_adapter(number)
    manager.lora_index_to_id = [number or None for number in manager.lora_index_to_id]
