# SPDX-License-Identifier: Apache-2.0
"""A process with an engine that has served, and slept if it is one of torpor's: prints what stands on vLLM's classes,
modules and instances. Started twice by tools/dev contract --touches, with and without torpor in use.

Takes the model, a directory for checkpoints, and "used" or "unused".
"""

import gc
import json
import os
import sys
import types
from pathlib import Path

from conftest import ENGINE
from vllm import LLM, SamplingParams

METHODS = (types.FunctionType, types.MethodType)


def is_of(package: str, owner: type) -> bool:
    module = owner.__module__  # of some classes it is a property of their instances
    return isinstance(module, str) and module.split(".")[0] == package


def is_vllms(owner: type) -> bool:
    return is_of("vllm", owner)


def origin(value) -> str:
    """The package that a function, or what is wrapped in one, comes from; else that of its class."""
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, (classmethod, staticmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        module = value.__globals__["__name__"]  # functools.wraps() says the module of what is wrapped
    else:
        module = (value if isinstance(value, type) else type(value)).__module__
    return (module or "").split(".")[0]


def on_classes_and_modules() -> dict[str, dict[str, str]]:
    """By owner, each name and the package that its value comes from, with a + where a base has one of that name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "vllm" or module is None:
            continue
        found[name] = {own: origin(value) for own, value in vars(module).items()}
        for cls in {value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name}:
            inherited = {own for base in cls.__mro__[1:] for own in vars(base)}
            found[f"{name}.{cls.__qualname__}"] = {
                own: origin(value) + "+" * (own in inherited) for own, value in vars(cls).items()
            }
    return found


# vLLM makes objects of these classes itself: it takes their names from its configuration.
EXTENSION_POINTS = ("torpor.vllm.scheduler", "torpor.vllm.worker")


def stock_of(kind: type) -> type:
    """The class of vLLM that a class is, or is made of."""
    return next((base for base in kind.__mro__ if is_vllms(base)), kind)


def on_instances() -> dict[str, dict[str, bool]]:
    """By class of vLLM's, names that torpor has set on its instances; whether each hides one of the class. An object
    whose class is torpor's, and vLLM did not make it so, has its `__class__` replaced."""
    found = {}
    getattr(gc, "unfreeze_all", gc.unfreeze)()  # vLLM hides what is there when the engine has started
    for one in gc.get_objects():
        kind = type(one)
        stock = stock_of(kind)
        owner = f"an instance of {stock.__module__}.{stock.__qualname__}"
        if not is_vllms(stock) or kind.__module__ in EXTENSION_POINTS:
            continue
        if is_of("torpor", kind):
            found.setdefault(owner, {})["__class__"] = True
        for name, value in list(getattr(one, "__dict__", {}).items()):
            if name.startswith(("torpor", "_torpor")) or (isinstance(value, METHODS) and origin(value) == "torpor"):
                found.setdefault(owner, {})[name] = hasattr(stock, name)
    return found


def main() -> None:
    model, directory, used = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "used"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    llm = LLM(str(model), additional_config={"torpor": {"checkpoint_dir": directory}} if used else {}, **ENGINE)
    for number in range(4):
        llm.llm_engine.add_request(str(number), "once upon a time", SamplingParams(max_tokens=40, seed=number))
    for _ in range(5):
        llm.llm_engine.step()
    if used:
        for to in ("host", "disk"):
            assert llm.sleep(level=1, preserve_state=True, to=to).changed
            assert llm.wake_up().fully_awake
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    print("RESULT " + json.dumps({"named": on_classes_and_modules(), "instances": on_instances()}), flush=True)


if __name__ == "__main__":
    main()
