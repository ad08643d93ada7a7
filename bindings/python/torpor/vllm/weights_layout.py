# SPDX-License-Identifier: Apache-2.0
"""Where each weight of a model lies in torpor's region, and what vLLM keeps beside it. Written into each checkpoint.

A new process finds the places of its parameters in a stored region by it, and sees afterwards whether vLLM made of them
what it made in the process that slept.
"""

from __future__ import annotations

import json

import torch

from torpor import _core
from torpor.errors import Damaged, Incompatible, Unsupported

OWN_FILES = "start the engine with the model's own files"


def describe(model: torch.nn.Module, packed: list, address: int, size: int) -> str:
    """Of a loaded model. `packed`: linear layers whose plain weights are no parameters any more."""
    inside = range(address, address + size)
    parameters = {
        name: [tensor.data_ptr() - address if tensor.data_ptr() in inside else -1, *_form(tensor)]
        for name, tensor in _weights(model, packed).items()
    }
    return json.dumps({"bytes": size, "parameters": parameters, "beside": _beside(model, inside)})


def parse(text: str) -> dict:
    """What describe() wrote. It comes from a file: nothing of it is believed before it was looked at."""
    try:
        layout = json.loads(text)
        whole = _is_size(layout["bytes"]) and all(map(_is_digest, layout["beside"].items()))
        whole = whole and all(map(_is_place, layout["parameters"].values()))
    except (ValueError, TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise Damaged("the checkpoint does not say how its weights lie", OWN_FILES)
    return layout


def offsets_of(model: torch.nn.Module, layout: dict) -> dict[int, int]:
    """For a model as it is before its weights are loaded: address of each storage -> its place in the stored region."""
    stored = layout["parameters"]
    offsets: dict[int, int] = {}
    nameless: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.numel() == 0:
            continue
        storage = parameter.untyped_storage()
        if name not in stored:
            nameless[storage.data_ptr()] = name  # perhaps it has another name, too
            continue
        at, *form = stored[name]
        if form != _form(parameter):
            raise _other_model(f"{name} is {form} there and {_form(parameter)} here")
        offset = at - parameter.storage_offset() * parameter.element_size()
        misplaced = offset % parameter.element_size() != 0
        if misplaced or offset < 0 or offset + storage.nbytes() > layout["bytes"]:
            raise _other_model(f"{name} lies outside of the region there")
        if offsets.setdefault(storage.data_ptr(), offset) != offset:
            raise _other_model(f"{name} shares memory with another parameter here, and not there")
    for storage, name in nameless.items():
        if storage not in offsets:
            raise _other_model(f"{name} is not there")
    return offsets


def check_same(stored: dict, own: dict) -> None:
    """After vLLM has processed the weights: they are where they were put, and what follows from them is the same."""
    for kind in ("parameters", "beside"):
        names = sorted({*stored[kind], *own[kind]})
        if differing := [name for name in names if stored[kind].get(name) != own[kind].get(name)]:
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            raise Unsupported(
                f"{differing[0]}{more} came out otherwise than in the process that slept: vLLM keeps more of this "
                "model than its parameters",
                OWN_FILES,
            )


def _weights(model: torch.nn.Module, packed: list) -> dict[str, torch.Tensor]:
    """By their names without LoRA, which puts its layers around the model's own."""
    named = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.numel() > 0}
    modules = {id(module): name for name, module in model.named_modules()}
    named |= {f"{modules[id(linear.layer)]}.weight": linear.plain for linear in packed}
    return {name.replace(".base_layer.", "."): tensor for name, tensor in named.items()}


def _is_size(value) -> bool:
    return type(value) is int and value >= 0


def _is_place(value) -> bool:
    at, dtype, *sizes = value
    return type(at) is int and type(dtype) is str and len(sizes) == 2 and all(map(_is_size, sizes[0] + sizes[1]))


def _is_digest(item) -> bool:
    return all(type(word) is str for word in item)


def _form(tensor: torch.Tensor) -> list:
    return [str(tensor.dtype), list(tensor.size()), list(tensor.stride())]


def _beside(model: torch.nn.Module, inside: range) -> dict[str, str]:
    """Buffers, other tensors and numbers of the modules: vLLM may have them from the model's files or its weights."""
    digests: dict[tuple, str] = {}
    found = {}
    for module_name, module in model.named_modules():
        attributes = {**vars(module), **dict(module.named_buffers(recurse=False))}
        for name, value in attributes.items():
            if isinstance(value, float):
                found[f"{module_name}.{name}"] = value.hex()
            elif isinstance(value, torch.Tensor) and value.numel() > 0 and not value.is_meta:
                if value.data_ptr() in inside:
                    continue
                key = (value.data_ptr(), *map(str, _form(value)))
                if key not in digests:
                    content = value.detach().contiguous().reshape(-1).view(torch.uint8)
                    digests[key] = _core.digest(content.numpy().tobytes())
                found[f"{module_name}.{name}"] = digests[key]
    return found


def _other_model(what: str) -> Incompatible:
    return Incompatible(f"the checkpoint has the weights of another model: {what}", OWN_FILES)
