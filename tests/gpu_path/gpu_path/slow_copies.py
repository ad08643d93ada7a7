# SPDX-License-Identifier: Apache-2.0
"""Streams on which nothing happens before somebody waits for it, in place of vLLM's placeholders, which never wait.

On a GPU a step returns while the device still works. Here three things that it leaves behind are late: the copies of
its results to the host, with garbage in their place; what the runner notes of the tokens that it has just sampled
(`postprocess_sampled`: last tokens, lengths, penalty counts); and the KV that a drafting model writes after that. All
are legal on a GPU, and all run in their stream's order when an event, a stream or the device is synchronized; notes and
KV also before the next step that computes. So who reads any of them without waiting reads what is not there yet.

A copy to the host is `Tensor.to("cpu", non_blocking=True)`, as vLLM's `async_utils` makes them. Kernels and all other
copies run at once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque

import torch

_lock = threading.RLock()  # a worker in a process of its own waits for its copies in a thread of their own
_streams: weakref.WeakSet = weakref.WeakSet()
_here = threading.local()
_to = torch.Tensor.to


class Stream:
    """Work in order: item n is done once `_done` is greater than n."""

    def __init__(self, *_, **__):
        self.device = torch.device("cpu")
        self._work: deque = deque()
        self._done = 0
        _streams.add(self)

    @property
    def end(self) -> int:
        with _lock:
            return self._done + len(self._work)

    def issue(self, work) -> None:
        with _lock:
            self._work.append(work)

    def run_to(self, end: int) -> None:
        with _lock, torch.inference_mode():  # as the steps that left it
            while self._done < end:
                work = self._work.popleft()
                self._done += 1
                work()

    def synchronize(self) -> None:
        self.run_to(self.end)

    def query(self) -> bool:
        return not self._work

    def wait_stream(self, other: Stream) -> None:
        self.issue(functools.partial(other.run_to, other.end))

    def wait_event(self, event: Event) -> None:
        self.issue(event.synchronize)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._outer = current_stream()
        set_stream(self)
        return self

    def __exit__(self, *_) -> None:
        set_stream(self._outer)


class Event:
    def __init__(self, *_, **__):
        self._recorded: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self._recorded = stream, stream.end

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        if self._recorded is not None:
            stream, end = self._recorded
            stream.run_to(end)

    def query(self) -> bool:
        return self._recorded is None or self._recorded[0]._done >= self._recorded[1]


_main = Stream()


def current_stream(*_, **__) -> Stream:
    return getattr(_here, "stream", _main)


def set_stream(stream: Stream) -> None:
    _here.stream = stream


def synchronize(*_, **__) -> None:
    for stream in list(_streams):
        stream.synchronize()


def install() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker  # puts its placeholders in place, for the last time
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    torch.Event = torch.cuda.Event = Event
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = current_stream
    torch.cuda.set_stream = set_stream
    torch.cuda.stream = lambda stream: stream if stream is not None else contextlib.nullcontext()
    torch.accelerator.synchronize = synchronize
    CPUWorker.synchronize_device = synchronize  # vLLM's asks first whether there is an accelerator
    torch.Tensor.to = _to_or_later
    LogprobsTensors.to_cpu_nonblocking = _log_probabilities_later
    GPUModelRunner.execute_model = _after_what_is_left(GPUModelRunner.execute_model)
    GPUModelRunner.sample_tokens = _after_what_is_left(GPUModelRunner.sample_tokens)
    GPUModelRunner.postprocess_sampled = _later(GPUModelRunner.postprocess_sampled)


def _to_or_later(tensor: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    to_host = bool(args) and isinstance(args[0], str) and args[0] == "cpu"
    return _copy_later(tensor) if to_host and kwargs.get("non_blocking") else _to(tensor, *args, **kwargs)


def _copy_later(source: torch.Tensor) -> torch.Tensor:
    """The source is read when the copy runs: who writes over it before has to wait as well."""
    garbage = float("nan") if source.is_floating_point() else 1  # one sampled token each, and one that never comes
    target = torch.full_like(source, garbage)
    current_stream().issue(functools.partial(target.copy_, source))
    return target


def _log_probabilities_later(self):
    """vLLM's own returns tensors of the CPU as they are."""
    tensors = (self.logprob_token_ids, self.logprobs, self.selected_token_ranks)
    cumulated = self.cu_num_generated_tokens_tensor
    return type(self)(
        *map(_copy_later, tensors),
        self.cu_num_generated_tokens,
        None if cumulated is None else _copy_later(cumulated),
    )


def _later(method):
    def issue(self, *args, **kwargs) -> None:
        self.main_stream.issue(functools.partial(method, self, *args, **kwargs))

    return issue


def _after_what_is_left(method):
    @functools.wraps(method)
    def run(self, scheduled, *args, **kwargs):
        if getattr(scheduled, "total_num_scheduled_tokens", 1) > 0:  # else the step has no kernels
            self.main_stream.synchronize()
        if getattr(self.speculator, "draft_attn_layer_names", None) and "propose" not in vars(self.speculator):
            self.speculator.propose = _writing_late(self, self.speculator.propose)
        return method(self, scheduled, *args, **kwargs)

    return run


def _writing_late(runner, propose):
    """Its drafts are there at once, as the next step's inputs; the KV of its layers is not."""

    def run(*args, **kwargs):
        runner.main_stream.synchronize()  # the kernels before it
        layers = runner.compilation_config.static_forward_context
        caches = [layers[name].kv_cache for name in sorted(runner.speculator.draft_attn_layer_names)]
        before = [cache.clone() for cache in caches]
        drafts = propose(*args, **kwargs)
        for cache, old in zip(caches, before, strict=True):
            written = cache != old
            new = cache[written]
            cache[written] = old[written]
            runner.main_stream.issue(functools.partial(cache.__setitem__, written, new))
        return drafts

    return run
