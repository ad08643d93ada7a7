# SPDX-License-Identifier: Apache-2.0
"""Calls of workers in several processes.

vLLM reads the answers of the workers one after the other, each from a queue of its own, and stops at the first failure.
Answers behind that one stay in their queues and are taken for those of the next call. So no worker fails a call: it
answers with its error as a value, which is raised when all have answered.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.v1.executor.abstract import Executor

from torpor.errors import Error, WrongState
from torpor.vllm.mixed_in import mix_in

logger = init_logger("vllm.torpor.worker_answers")

_IN_THIS_PROCESS = ("uni", "external_launcher")  # executors whose only worker answers before they return


def adopt(executor: Executor) -> None:
    """Give the executor of an engine that asks its mixin, if it reads answers from queues."""
    if hasattr(executor, "response_mqs"):
        mix_in(executor, ExecutorMixin)


class ExecutorMixin(Executor):
    """Mixin of an executor that reads the answers of its workers from queues."""

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False, **of_steps):
        """Call the workers. Raises torpor's own errors as they are, and others as vLLM does, when all have answered.

        of_steps: vLLM gives these only in calls of steps. Such calls stay as they are: one worker answers, or the
            engine ends with the first failure.
        """
        if any(value is not None for value in of_steps.values()):
            return super().collective_rpc(method, timeout, args, kwargs, non_block, **of_steps)
        asked = super().collective_rpc(partial(answer, method), timeout, args, kwargs, non_block=True)
        answers = Answers(self, method, asked)
        return answers if non_block else answers.result()


class Answers(Future):
    """The answers of all workers. Like vLLM's own future, it reads their queues in result(), and not before."""

    def __init__(self, executor: Executor, method, asked: Future):
        super().__init__()
        self._executor, self._method, self._asked = executor, method, asked

    def result(self, timeout=None) -> list:
        try:
            answers = self._asked.result(timeout)
        except TimeoutError as problem:
            _note_unanswered(self._executor, self._method, "timed out")
            raise TimeoutError(f"RPC call to {self._method} timed out.") from problem
        except BaseException:
            _note_unanswered(self._executor, self._method, "did not get all answers")
            raise
        for well, value in answers:
            if not well:
                raise (
                    value
                    if isinstance(value, Error)
                    else RuntimeError(
                        f"Worker failed with error '{value}', please check the stack trace above for the root cause"
                    )
                )
        return [value for _, value in answers]


def answer(method: str | Callable, worker, /, *args, **kwargs) -> tuple[bool, Any]:
    """In a worker: whether the call went well, and its result or error."""
    try:
        function = getattr(worker, method) if isinstance(method, str) else partial(method, worker)
        return True, function(*args, **kwargs)
    except Exception as problem:
        logger.exception("A call of this worker failed.")
        return False, problem if isinstance(problem, Error) else str(problem)


def note_timeout(core, method) -> None:
    """vLLM does not tell the answers of workers in other processes apart, and this one is still to come."""
    if core.vllm_config.parallel_config.distributed_executor_backend not in _IN_THIS_PROCESS:
        _note_unanswered(core.model_executor, method, "timed out")


def _note_unanswered(executor, method, what: str) -> None:
    name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
    executor.torpor_unanswered = f"collective_rpc({name!r}) {what}"


def check_answered(core) -> None:
    """Raise WrongState if an answer of an earlier call may still come."""
    if (call := getattr(core.model_executor, "torpor_unanswered", None)) is not None:
        raise WrongState(f"{call}: a late answer would be taken for the next one's", "restart the engine")
