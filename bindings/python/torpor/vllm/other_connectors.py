# SPDX-License-Identifier: Apache-2.0
"""A sleep beside a KV connector that is not torpor's.

Before the sleep the connector's transfers end, by steps of vLLM that compute nothing. Then each worker's connector
unregisters the KV cache. A wake registers it again when all content is back. vLLM has these hooks since 0.33. A
connector that does not implement them is refused by name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from torpor import _core
from torpor.errors import DeviceError, Error, TimedOut, Unsupported, WrongState
from torpor.vllm import connector_options, connector_sleep, plugin
from torpor.vllm.connector_options import is_ours

logger = logging.getLogger("vllm.torpor")

_HOOKS = ("unregister_kv_caches", "restore_kv_caches")
_TRANSFER_SECONDS = 60.0  # that transfers have to end, if the sleep has no timeout
_LOOK_SECONDS = 0.002  # between steps that compute nothing


def refusals(vllm_config) -> list[str]:
    """Return why no sleep keeps requests beside this engine's KV connector. Empty if one does, or if there is none."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or is_ours(transfer):
        return []
    why = _why_not(vllm_config)
    return [] if why is None else [f"a KV connector{why and f': {why}'}"]


def _why_not(vllm_config) -> str | None:
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    if not all(hasattr(KVConnectorBase_V1, hook) for hook in _HOOKS):
        return "vLLM has the hooks for a sleep beside one since 0.33"
    try:
        plugin.check("other_connectors")
        (outer, _), *inside = found = _classes(transfer)
    except Error as problem:
        return problem.what
    except Exception:  # no connector at all, or one that cannot be imported
        return ""
    if nested := next((cls for cls, _ in inside if issubclass(cls, MultiConnector)), None):
        return f"{nested.__name__} inside {outer.__name__}"
    for cls, config in found:
        if not all(_implements(cls, hook) for hook in _HOOKS):
            return f"{cls.__name__} does not implement {' and '.join(_HOOKS)}"
        try:
            supports = cls.supports_sleep_mode(config)
        except Exception as problem:
            return f"{cls.__name__}.supports_sleep_mode(): {type(problem).__name__}: {problem}"
        if not supports:
            return f"{cls.__name__} says that it does not support sleep mode as it is configured"
    if parallel.data_parallel_size > 1:
        return f"{outer.__name__} of data parallel ranks"
    if parallel.pipeline_parallel_size > 1:
        return f"{outer.__name__} in a pipeline"
    return None


def _implements(cls, hook: str) -> bool:
    """A connector that inherits vLLM's empty hook never said that it can do without the KV cache's memory."""
    return getattr(cls, hook, None) not in (None, getattr(KVConnectorBase_V1, hook, None))


def _classes(transfer) -> list[tuple[Any, KVTransferConfig]]:
    """Return the connector's class and configuration, then those of each connector inside it if it is vLLM's
    MultiConnector or one derived from that."""
    configs = [transfer]
    if issubclass(KVConnectorFactory.get_connector_class(transfer), MultiConnector):
        inside = connector_options.inside(transfer)
        configs += [KVTransferConfig(**{"engine_id": transfer.engine_id, **each}) for each in inside]
    return [(KVConnectorFactory.get_connector_class(each), each) for each in configs]


def open_transfers(scheduler) -> list[str]:
    """Return what the scheduler's KV connector has under way, in words."""
    requests, connector = scheduler.requests.values(), scheduler.connector
    counts = {
        "requests that wait for KV": sum(r.status is RequestStatus.WAITING_FOR_REMOTE_KVS for r in requests),
        "ended requests whose KV it holds": sum(r.is_finished() for r in requests),
        "deferred loads": len(getattr(scheduler, "deferred_loads", ())),
        "deferred frees of blocks": len(scheduler.deferred_frees),
    }
    found = [f"{what} ({count})" for what, count in counts.items() if count > 0]
    if any(map(_has_transfers, _parts(connector))):
        found.append("transfers that no request waits for")
    return found


def has_remote_prompt(request) -> bool:
    """Return whether this request is still to pull KV of its prompt from another engine, by the parameters that vLLM's
    NixlConnector, MooncakeConnector and MoRIIOConnector share."""
    params = request.kv_transfer_params or {}
    of_earlier_turn = params.get("do_remote_decode") and params.get("remote_block_ids")  # from a decode engine
    return request.num_computed_tokens == 0 and bool(params.get("do_remote_prefill") or of_earlier_turn)


def _parts(connector) -> tuple:
    """Return the connectors inside vLLM's MultiConnector, or the connector itself if it is another one."""
    return connector_options.members(connector)[1:] or (connector,)


def _has_transfers(connector) -> bool:
    """Return whether the connector has transfers from or to the device that no request waits for."""
    is_torpors = type(connector).__name__ == connector_options.CLASS  # its push work goes on to a disk or store, too
    works = connector.has_transfers_of_device() if is_torpors else connector.has_pending_push_work()
    return works or connector.has_pending_block_frees()


class OtherConnector:
    """The KV connector of one engine core that is not torpor's. Called in the engine core's thread, between steps."""

    def __init__(self, core):
        self._core = core
        transfer = None if core.scheduler.connector is None else core.vllm_config.kv_transfer_config
        self.is_there = transfer is not None and not is_ours(transfer)
        self.follows = self.is_there and not refusals(core.vllm_config)  # False: there is none, or it is refused
        self._name = getattr(transfer, "kv_connector", None)
        self._registered = True  # on all ranks

    def finish_transfers(self, timeout: float | None = None) -> None:
        """Return when no transfer and no delayed free is open. The engine stands still, so that none begins.

        Raises TimedOut if one is still open after `timeout` seconds. What ended by then has ended.
        """
        if self.follows:
            self._finish(timeout, self._under_way)

    def end_transfers(self, timeout: float | None = None) -> None:
        """End transfers as finish_transfers() does, also of a connector beside which no sleep keeps requests. The
        connector then also knows all requests that have ended."""
        if self.is_there:
            self._finish(timeout, lambda: self._under_way() + self._unheard())

    def forget_prefixes(self) -> None:
        """Have the connector forget KV of earlier weights that no request needs. Its transfers end first: one that
        stores such KV would bring it back."""
        if not self.is_there:
            return
        self.end_transfers()
        if not self._core.scheduler.reset_connector_cache():
            raise WrongState(
                f"the KV connector {self._name} did not reset its cache, which has KV of the old weights", "try again"
            )

    def sends(self) -> bool:
        """Return whether the connector has transfers that go on when all requests have ended."""
        return self.is_there and any(map(_has_transfers, _parts(self._core.scheduler.connector)))

    def end_transfers_of(self, requests: Iterable[str], timeout: float | None = None) -> None:
        """Return when the connector knows that the earlier requests of these ids have ended, and holds no block of
        them. Transfers of other requests go on. The engine takes no step. Raises TimedOut as finish_transfers()."""
        if self.is_there:
            ids = set(requests)
            self._finish(timeout, lambda: self._held_of(ids) + self._unheard(ids))

    def compute_remote_prompts(self) -> None:
        """Have this engine compute the prompts whose KV lies in another engine, after a sleep: the other one keeps that
        KV while it hears from this one's steps, and may have freed it."""
        for request in self._core.scheduler.requests.values() if self.is_there else ():
            if has_remote_prompt(request):
                request.kv_transfer_params |= {"do_remote_prefill": False, "remote_block_ids": None}

    def _held_of(self, ids: set[str]) -> list[str]:
        known = self._core.scheduler.requests
        count = sum(each in known and known[each].is_finished() for each in ids)
        return [f"ended requests whose KV it holds ({count})"] if count > 0 else []

    def _unheard(self, ids: set[str] | None = None) -> list[str]:
        """`ids`: the requests that count; None: all."""
        finished = self._core.scheduler.finished_req_ids
        count = len(finished if ids is None else ids.intersection(finished))
        return [f"ended requests of which it has not heard ({count})"] if count > 0 else []

    def _finish(self, timeout: float | None, under_way: Callable[[], list[str]]) -> None:
        core, scheduler = self._core, self._core.scheduler
        deadline = time.monotonic() + (_TRANSFER_SECONDS if timeout is None else timeout)
        state = scheduler.pause_state
        try:
            while found := under_way():
                _core.end_stops()  # a console may hold a load of torpor's connector inside this one
                if time.monotonic() >= deadline:
                    raise TimedOut(
                        f"the KV connector {self._name} still has {', '.join(found)}",
                        "let its transfers end first, or give the call a longer timeout",
                    )
                if not scheduler.torpor_collects:
                    scheduler.set_pause_state(PauseState.PAUSED_ALL)  # no request is scheduled
                    scheduler.torpor_collects = True
                self._take_step()
                time.sleep(_LOOK_SECONDS)
        finally:
            if scheduler.torpor_collects:
                scheduler.torpor_collects = False
                try:
                    while core.batch_queue:
                        self._take_step()
                finally:
                    scheduler.set_pause_state(state)

    def _under_way(self) -> list[str]:
        """Return open transfers. Requests whose loads have ended wait for their turn from now on."""
        scheduler = self._core.scheduler
        connector_sleep.settle(scheduler)
        return open_transfers(scheduler)

    def _take_step(self) -> None:
        outputs, executed = self._core.step_fn()
        connector_sleep.deliver(self._core, outputs)
        self._core.post_step(executed)

    def check_quiet(self) -> None:
        """Raise Unsupported if a transfer is open."""
        if self.follows and (under_way := open_transfers(self._core.scheduler)):
            raise Unsupported(
                f"the KV connector {self._name} has {', '.join(under_way)}", "let its transfers end first"
            )

    def unregister(self) -> None:
        """Have the connector of each rank forget the KV cache. If a rank fails, restore() undoes the others."""
        if not self.follows:
            return
        self.check_quiet()
        self._registered = False
        if problem := self._call_ranks("unregister_kv_caches"):
            raise DeviceError(f"the KV connector {self._name}: {problem}", "sleep again, or restart the engine")

    def restore(self, undoing: bool) -> None:
        """Undo unregister(): the KV cache has its memory and content. May be called again.

        `undoing`: a sleep that failed, whose requests go on. Their next step needs no transfer, so that a failure is
        logged. The next wake tries again.
        """
        if self._registered:
            return
        problem = self._register()
        if problem and undoing:
            problem = self._register()
        if problem and not undoing:
            raise DeviceError(f"the KV connector {self._name}: {problem}", "wake it again")
        if problem:
            logger.error("the KV connector %s cannot transfer until the next wake: %s", self._name, problem)
        else:
            self._registered = True

    def _register(self) -> str | None:
        """Register the KV cache on all ranks, and hand its metadata to the scheduler's connector, which peers ask.
        Return why it failed."""
        if problem := self._call_ranks("restore_kv_caches"):
            return problem
        try:
            self._core._set_kv_connector_handshake_metadata()
        except Exception as error:
            logger.exception("peers still have the registration of the KV cache from before the sleep")
            return f"its metadata for peers: {type(error).__name__}: {error}"
        return None

    def _call_ranks(self, hook: str) -> str | None:
        """Return the first failure. All ranks have tried by then."""
        failures = self._core.collective_rpc("torpor_call_connector", args=(hook,))
        return next(filter(None, failures), None)


def call_in_worker(rank: int, hook: str) -> str | None:
    """Call a hook of this worker's connector. Returns why it failed."""
    try:
        getattr(get_kv_transfer_group(), hook)()
    except Exception as problem:
        logger.exception("%s() of rank %d failed", hook, rank)
        return f"{hook}() of rank {rank}: {type(problem).__name__}: {problem}"
    return None
