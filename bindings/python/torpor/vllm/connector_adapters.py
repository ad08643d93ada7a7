# SPDX-License-Identifier: Apache-2.0
"""Keys of LoRA requests, where blocks outlive the engine or are shared: they depend on the adapter's content.

vLLM's hash of a block has the adapter's name and path. On disk and in a shared store that is too little: there lies KV
of other weights of the same name. So the salt of such a request (`Request.cache_salt`, which vLLM hashes with the first
block) begins with a line of torpor's: the digest of the adapter as the workers have it. A request whose adapter has no
digest that all workers agree on gets a word that no other request has, and shares with nobody.

The scheduler knows the content as of the last report of the workers. A request whose adapter it does not know waits:
the workers read the adapter and tell its digest. If they read other content than the scheduler thought, requests that
loaded KV of the older one and have computed nothing since begin again; those that were under way go on, as in vLLM.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from vllm.v1.request import Request, RequestStatus

from torpor.vllm import adapters, connector_sleep
from torpor.vllm.connector_begin_again import begin_again
from torpor.vllm.connector_messages import Report

_MARK = "torpor adapter "  # a salt's first line: this, and either of
_CONTENT, _OWN = "content ", "own "
_NOT_BEGUN = (
    RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR, RequestStatus.PREEMPTED
)  # fmt: skip


class AdapterKeys:
    """The scheduler's side of the connector: the adapters of the workers, and the requests that name one."""

    def __init__(self) -> None:
        self._held: dict[int, str] = {}  # by number: the digest of what all workers have
        self._invalidated_at = 0  # step after which somebody may have changed that
        self._wanted: dict | None = None  # an adapter that the workers shall read in the next step
        self._requests: dict[str, Request] = {}
        self._alone: dict[str, str] = {}  # requests that share keys with nobody, and a word of each
        self._under_way: set[str] = set()  # requests that have computed since they got their blocks
        self.outdated: set[str] = set()  # requests that load, or have loaded, KV of other content than is there now

    def begin(self, request: Request) -> bool:
        """Take a new request. Return whether its keys are what they will be when it is looked up."""
        self._requests[request.request_id] = request
        if request.lora_request.load_inplace:  # vLLM reads its adapter anew in each step
            self._alone[request.request_id] = secrets.token_hex(16)
        if (word := self._word_for(request)) is None:
            _salt(request, _OWN + secrets.token_hex(16))  # never without a word, whatever becomes of it
            return False
        _salt(request, word)
        return True

    def restore(self, request: Request) -> None:
        """Take a request that was begun in an earlier process."""
        self._requests[request.request_id] = request
        self._held.clear()  # the wake may have loaded others
        if request.num_computed_tokens > 0:
            self._under_way.add(request.request_id)
        if request.lora_request.load_inplace:
            self._alone[request.request_id] = secrets.token_hex(16)

    def end(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._alone.pop(request_id, None)
        self._under_way.discard(request_id)
        self.outdated.discard(request_id)

    def look(self, request: Request) -> bool | None:
        """Before a look-up of a request that has no blocks: whether its keys were made anew. None: it has to wait."""
        self._under_way.discard(request.request_id)
        self.outdated.discard(request.request_id)
        if (word := self._word_for(request)) is None:
            # One in a step: reading takes time, and vLLM may not admit all of them.
            self._wanted = self._wanted or adapters.to_value(request.lora_request)
            return None
        return _salt(request, word)

    def _word_for(self, request: Request) -> str | None:
        if (own := self._alone.get(request.request_id)) is not None:
            return f"{_OWN}{own} {request.num_preemptions}"  # what it computed before may be of other content, too
        digest = self._held.get(request.lora_request.lora_int_id)
        return None if digest is None else _CONTENT + digest

    def take_wanted(self) -> dict | None:
        wanted, self._wanted = self._wanted, None
        return wanted

    def invalidate(self, step: int) -> None:
        """Adapters may be other ones after this step: requests wait until the workers have reported theirs."""
        self._invalidated_at = step
        self._held.clear()

    def reported(self, report: Report) -> list[Request]:
        """Take what the workers have. Return the waiting requests whose keys were made anew."""
        if report.adapters is None:
            return []
        if report.step > self._invalidated_at:
            self._held = {number: digest for number, digest in report.adapters.items() if digest}
        else:
            self._held = {}
        made = []
        for request in self._requests.values():
            if request.num_computed_tokens > 0 or request.status not in _NOT_BEGUN:
                continue
            if report.adapters.get(request.lora_request.lora_int_id) == "":  # vLLM says so if it cannot be loaded
                self._alone.setdefault(request.request_id, secrets.token_hex(16))
            if (word := self._word_for(request)) is not None and _salt(request, word):
                made.append(request)
        return made

    def changed(self, found: dict[int, str]) -> list[Request]:
        """Return the requests with blocks whose keys tell of other content than the workers have found."""
        return [
            request
            for request in self._requests.values()
            if (digest := found.get(request.lora_request.lora_int_id)) is not None
            and (request.num_computed_tokens > 0 or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
            and (word := _word_of(request)).startswith(_CONTENT)
            and word != _CONTENT + digest
        ]

    def is_under_way(self, request: Request) -> bool:
        return request.request_id in self._under_way

    def computed(self, request_ids: Iterable[str]) -> None:
        """A step with these requests is over."""
        if self._requests:
            self._under_way.update(self._requests.keys() & request_ids)

    def separate(self, request: Request) -> None:
        """Give a request keys that no other request has: its next KV lies on top of KV of other content."""
        _salt(request, _OWN + secrets.token_hex(16))


def _word_of(request: Request) -> str:
    first, _, _ = (request.cache_salt or "").partition("\n")
    return first.removeprefix(_MARK) if first.startswith(_MARK) else ""


def _salt(request: Request, word: str) -> bool:
    """Let a request's salt begin with this word, before the user's own. Return whether that made other keys."""
    salt = request.cache_salt or ""
    own = salt.partition("\n")[2] if salt.startswith(_MARK) else salt
    if (salted := f"{_MARK}{word}\n{own}") == salt:
        return False
    request.cache_salt = salted
    request.block_hashes.clear()
    request.update_block_hashes()
    return True


def keys_of(scheduler) -> AdapterKeys | None:
    """Return the AdapterKeys of a scheduler; None: keys of its requests are vLLM's."""
    side = connector_sleep.side_of(scheduler)
    return None if side is None or side.adapters is None or side.core is None else side.adapters


def restored(scheduler, with_adapters: bool) -> None:
    """After a wake in a new process. `with_adapters`: keys of the engine that slept depended on adapters as here."""
    if (keys := keys_of(scheduler)) is None or with_adapters:
        return
    _forget_all(scheduler)
    for request in scheduler.requests.values():
        if request.lora_request is not None:
            keys.separate(request)


def _forget_all(scheduler) -> None:
    pool = scheduler.kv_cache_manager.block_pool
    for block in pool.blocks:
        pool._maybe_evict_cached_block(block)


def before_outputs(scheduler, scheduler_output, model_runner_output) -> None:
    """Before a step's outputs are taken: see whether its adapters were what the keys of its requests say.

    Nothing of the step is stored yet, and nothing will be: it may be KV of the older content, the newer, or both.
    """
    if (keys := keys_of(scheduler)) is None:
        return
    report = _report_in(model_runner_output)
    if report is not None and report.adapters is not None and (changed := keys.changed(report.adapters)):
        _forget_all(scheduler)
        again = []
        for request in changed:
            if request.status is RequestStatus.RUNNING and not keys.is_under_way(request):
                again.append(request)
            elif request.status in (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_STREAMING_REQ):
                keys.separate(request)
            else:
                keys.outdated.add(request.request_id)
        begin_again(scheduler, connector_sleep.side_of(scheduler), again, report.step)
    keys.computed(scheduler_output.num_scheduled_tokens)


def _report_in(model_runner_output) -> Report | None:
    output = getattr(model_runner_output, "kv_connector_output", None)
    found = getattr(output, "kv_connector_worker_meta", None)
    reports = [each for each in getattr(found, "metadata", (found,)) if isinstance(each, Report)]  # of MultiConnector
    return reports[0] if reports else None


def before_schedule(scheduler) -> None:
    """Before a step is made up: requests that have loaded KV of an older content give it back."""
    if (keys := keys_of(scheduler)) is None or not keys.outdated:
        return
    for request in [r for r in scheduler.kv_holding_waiting if r.request_id in keys.outdated]:
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            if request.request_id not in scheduler.finished_recving_kv_req_ids:
                continue  # it still loads
            scheduler._handle_blocked_waiting_request(request)
        if request.num_computed_tokens > 0:
            connector_sleep.take_back(scheduler, [request])
        keys.outdated.discard(request.request_id)
