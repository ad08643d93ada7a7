# SPDX-License-Identifier: Apache-2.0
"""verl's server and replica over a vLLM that keeps its requests. How to use them: docs/trainers/verl.md.

Where verl aborts what runs, for clients to send it again, the engine stands still between two steps instead; clients
go on waiting for the same answer. The methods are those of verl 0.9.1, by name and meaning.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from torpor.errors import InvalidArgument, Unsupported
from torpor.verl import NAME

# Methods of verl's workers that write weights.
_WRITE_WEIGHTS = frozenset({"update_weights_from_ipc", "update_verl_delta_weights"})
_ADMISSION_SECONDS = 60.0  # for requests that have passed the gate to reach an engine that is to abort them


class TorporHttpServer(vLLMHttpServer):
    """verl's vLLMHttpServer; `rollout.custom.torpor.kv` says what becomes of KV of older weights.

    "recompute" (the default): it is computed again after a weight sync. "keep": half-done requests go on with it. No
    new request ever finds it.
    """

    def _validate_configs(self) -> None:
        super()._validate_configs()
        os.environ.setdefault("TORPOR_ENABLED", "1")  # who chooses this rollout asks for torpor
        self._kv = kv_of((self.config.custom or {}).get(NAME) or {})
        self._updated = False  # since requests last ran
        self._begun: dict[str, int | None] = {}  # by request: the step of the weights when it was admitted
        checks = {
            "LoRA adapters (use model.lora.merge=True)": self.lora_as_adapter,
            "disaggregated prefill": self._disaggregation_role != "null",
        }
        if found := [name for name, is_so in checks.items() if is_so]:
            raise Unsupported(f"verl's rollout {NAME!r} with {'; '.join(found)}", "use rollout.name=vllm")

    # --- requests -----------------------------------------------------------------------------------------------------

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """Nothing is aborted: the engine pauses, and new requests wait at verl's gate.

        With `reject_request`, of a replica that leaves the load balancer, requests end, for clients to go elsewhere.
        """
        aborted: list[str] = []
        if self.node_rank == 0:
            self._submission_paused, self._rejecting = True, reject_request
            self._resume_event.clear()
            if reject_request:
                aborted = await self._abort(reset_prefix_cache)
            else:
                await self.engine.sleep(level=0)
        return {"aborted_count": len(aborted), "request_ids": aborted}

    async def _abort(self, reset_prefix_cache: bool) -> list[str]:
        deadline = time.monotonic() + _ADMISSION_SECONDS
        while self._admitting > 0 and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        aborted = list(self.engine.output_processor.request_states)
        if await self.engine.is_sleeping():
            await self.engine.wake_up(kv="abort")
        await self.engine.pause_generation(mode="abort", clear_cache=reset_prefix_cache)
        return aborted

    async def resume_engine_generation(self) -> None:
        """Requests go on; if weights were written meanwhile, by `kv`."""
        if self.node_rank == 0:
            await self._wake(None)
            await super().resume_engine_generation()  # also after requests were rejected

    async def _park_until_admitted(self, request_id: str) -> TokenOutput | None:
        rejected = await super()._park_until_admitted(request_id)
        if rejected is None:
            self._begun[request_id] = self.global_steps
        return rejected

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, *args, **kwargs
    ) -> TokenOutput:
        """verl's; an answer may have been drawn by several versions of the weights: extra_fields has the outermost."""
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, *args, **kwargs)
        finally:
            begun = self._begun.pop(request_id, None)
        output.extra_fields |= {"min_global_steps": begun, "max_global_steps": output.extra_fields["global_steps"]}
        return output

    # --- memory -------------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Frees weights and KV cache; the blocks of requests go to host memory."""
        if self.node_rank != 0 or not self.config.free_cache_engine or self._is_standalone():
            return
        level = self._resolve_sleep_level() if self.rollout_mode == RolloutMode.HYBRID else 1
        weights = "reload" if level == 2 else "store"  # verl's level 2: a weight sync comes before the wake
        await self.engine.sleep(level=level, preserve_state=True, weights=weights)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Memory of these tags, or all of it, is there again; once all is, requests go on."""
        if self.node_rank == 0 and not self._is_standalone():
            await self._wake(tags if self.rollout_mode == RolloutMode.HYBRID else None)

    async def release_kv_cache(self) -> None:
        """Frees the KV cache for a weight sync; the blocks of requests go to host memory."""
        if self._frees_kv_for_a_sync():
            await self.engine.sleep(level=1, preserve_state=True, tags=["kv_cache"])

    async def resume_kv_cache(self) -> None:
        """After release_kv_cache() and the sync: requests go on."""
        if self._frees_kv_for_a_sync():
            await self._wake(["kv_cache"])

    async def clear_kv_cache(self) -> None:
        """After a weight sync. While the engine is asleep it is the wake that drops KV of the older weights."""
        if self.node_rank == 0 and not await self.engine.is_sleeping():
            await super().clear_kv_cache()

    async def _wake(self, tags: list[str] | None) -> None:
        if await self.engine.wake_up(tags, kv=self._kv if self._updated else None):
            self._updated = False

    def _is_standalone(self) -> bool:
        return self.rollout_mode == RolloutMode.STANDALONE

    def _frees_kv_for_a_sync(self) -> bool:
        return self.node_rank == 0 and self.config.free_cache_engine and self.rollout_mode != RolloutMode.COLOCATED

    # --- weights ------------------------------------------------------------------------------------------------------

    async def collective_rpc(
        self,
        method: str | Callable,
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """verl's. While it writes weights no request may run; if it fails, none runs before another has ended well."""
        if not isinstance(method, str) or method not in _WRITE_WEIGHTS:
            return await super().collective_rpc(method, timeout, args, kwargs)
        async with self.engine.updating_weights():
            await super().collective_rpc(method, timeout, args, kwargs)
        self._updated = True

    async def set_global_steps(self, global_steps: int) -> None:
        """Also vLLM's version of the weights, which its outputs and checkpoints have."""
        await super().set_global_steps(global_steps)
        if self.node_rank == 0:
            await self.engine.update_weight_version(str(global_steps))


class TorporReplica(vLLMReplica):
    """verl's vLLMReplica of such servers. It never waits for requests to end before its servers free memory."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(TorporHttpServer)

    async def sleep(self) -> None:
        """Every server frees its memory, and keeps its requests."""
        await RolloutReplica.sleep(self)

    async def release_kv_cache(self) -> None:
        """Every server frees its KV cache, and keeps its requests."""
        await RolloutReplica.release_kv_cache(self)

    def _get_server_name_prefix(self) -> str:
        return f"{NAME}_"


def kv_of(custom: dict) -> str:
    """The one option of `rollout.custom.torpor`."""
    if unknown := sorted(custom.keys() - {"kv"}):
        raise InvalidArgument(f"rollout.custom.{NAME} has {', '.join(unknown)}", "there is only kv")
    kv = custom.get("kv", "recompute")
    if kv not in ("recompute", "keep"):
        raise InvalidArgument(f"rollout.custom.{NAME}.kv is {kv!r}", 'use "recompute" or "keep"')
    return kv
