"""Triton's interpreter, which runs the kernels of vLLM's GPU path on CPU tensors: what it needs for that, and for speed.

Kernels mean what they meant. The interpreter patches triton.language for each launch and each call of a device function,
which costs far more than most kernels; and it copies what a launch was given to the host and back, where it is already.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types

import numpy as np


def offer_backend() -> None:
    """vLLM's build for CPUs uses Triton only beside a backend of the name "cpu"; interpreted kernels ask it nothing."""
    from triton.backends import Backend, backends

    backends.setdefault("cpu", Backend(compiler=None, driver=None))


def install() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TORPOR_RIG is set but TRITON_INTERPRET is not; start the process with all of rig.environment()")
    from triton.runtime import interpreter

    _patch_the_language_once(interpreter)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    stock, known = interpreter._get_np_dtype, {}

    def np_dtype(tt):
        key = tt.scalar.name
        if key not in known:
            known[key] = stock(tt)
        return known[key]

    interpreter._get_np_dtype = np_dtype
    _use_arguments_in_place(interpreter.GridExecutor)
    _boolean_masks(interpreter)


def _patch_the_language_once(interpreter) -> None:
    """For good: in a process of the rig nothing compiles kernels."""
    import triton.language as tl

    everywhere = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang(everywhere)
    nothing_to_restore = types.SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda fn: nothing_to_restore


def _use_arguments_in_place(executor) -> None:
    executor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    executor._restore_args_dev = lambda self, *args: None


def _boolean_masks(interpreter) -> None:
    """Masks that kernels compute can be integers of 0 and 1, which loads and stores refuse."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_booleans(mask):
        return mask if mask.data.dtype == np.bool_ else interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)

    def create_masked_load(self, ptrs, mask, *options):
        return load(self, ptrs, as_booleans(mask), *options)

    def create_masked_store(self, ptrs, value, mask, *options):
        return store(self, ptrs, value, as_booleans(mask), *options)

    builder.create_masked_load, builder.create_masked_store = create_masked_load, create_masked_store
