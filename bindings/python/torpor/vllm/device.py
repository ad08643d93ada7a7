# SPDX-License-Identifier: Apache-2.0
"""What depends on the device of a worker: its default generator, and what of it can change tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


TORCH, NUMPY = "torch", "numpy"  # the generators of a process: of the device, by default; and of numpy
ALL = frozenset({TORCH, NUMPY})


def generator_state(device: torch.device) -> bytes:
    """Of the generator that requests without a seed share."""
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    return state.numpy().tobytes()


def set_generator_state(device: torch.device, state: bytes) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state_tensor(state))
    else:
        torch.cuda.set_rng_state(state_tensor(state), device)


@contextmanager
def generators_kept(device: torch.device, but: frozenset[str]) -> Iterator[None]:
    """At the end, the generators of this process are as they were at the beginning, except for those of `but`."""
    numpys, torchs = np.random.get_state(), generator_state(device)
    try:
        yield
    finally:
        if NUMPY not in but:
            np.random.set_state(numpys)
        if TORCH not in but:
            set_generator_state(device, torchs)


def state_tensor(state: bytes) -> torch.Tensor:
    """The state of a torch.Generator from its bytes."""
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def describe(device: torch.device) -> dict[str, str]:
    """Fields of the fingerprint: which kernels run here, and so how they round."""
    if device.type == "cpu":
        return {"cpu_capability": torch.backends.cpu.get_cpu_capability()}
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()
    found = torch.cuda.get_device_properties(device)
    major = driver.split(".")[0]  # later digits mend faults, and change no digit of a kernel that is compiled elsewhere
    return {
        "gpu": f"{found.name}, compute capability {found.major}.{found.minor}",
        "cuda": f"{torch.version.cuda}, driver {major}",
    }
