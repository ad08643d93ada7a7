# SPDX-License-Identifier: Apache-2.0
"""torpor's part of a scheduler: in front of the class that vLLM would take, in torpor's engines and no others."""

import copy
import json
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import result_of
from foreign_process import NAMES
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCoreProc

from torpor.vllm import connector_failed, connector_sleep, hooks, plugin, scheduler
from torpor.vllm.options import holds_memory_by, holds_memory_of
from torpor.vllm.support import base_of

pytestmark = pytest.mark.core
HERE = __name__


class Fair(AsyncScheduler):
    """A scheduler of somebody's own."""


class Foreign(SchedulerInterface):
    """One that has nothing of vLLM's but its interface."""


Foreign.__abstractmethods__ = frozenset()


def configuration(scheduler_cls=None, asynchronous=False, torpor=None) -> SimpleNamespace:
    scheduling = SimpleNamespace(scheduler_cls=scheduler_cls, async_scheduling=asynchronous)
    parallel = SimpleNamespace(worker_cls="vllm.v1.worker.cpu_worker.CPUWorker")
    return SimpleNamespace(
        additional_config={"torpor": torpor or {}}, scheduler_config=scheduling, parallel_config=parallel,
        kv_transfer_config=None,
    )  # fmt: skip


def chosen(**options) -> type:
    """By its name, as any process finds it."""
    config = configuration(**options)
    scheduler.choose(config)
    once = config.scheduler_config.scheduler_cls
    scheduler.choose(copy.deepcopy(config))
    scheduler.choose(config)
    assert config.scheduler_config.scheduler_cls == once and isinstance(once, str)
    return resolve_obj_by_qualname(once)


@pytest.mark.parametrize(
    ("options", "base"),
    [
        ({}, Scheduler),
        ({"asynchronous": True}, AsyncScheduler),
        ({"scheduler_cls": f"{HERE}.Fair"}, Fair),
        ({"scheduler_cls": Fair}, Fair),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler", "asynchronous": True}, Scheduler),
    ],
)
def test_it_stands_in_front_of_the_scheduler_that_vllm_would_take(options, base):
    made = chosen(**options)
    assert made.__mro__[1:3] == (scheduler.SchedulerMixin, base) and made.__name__ == base.__name__
    assert base_of(made.__new__(made)) is base and base_of(base.__new__(base)) is base
    assert ForkingPickler.loads(ForkingPickler.dumps(made)) is made  # as vLLM starts its processes


def test_a_change_of_async_scheduling_is_followed():
    config = configuration()
    scheduler.choose(config)
    config.scheduler_config.async_scheduling = True
    scheduler.choose(config)
    assert resolve_obj_by_qualname(config.scheduler_config.scheduler_cls).torpor_base is AsyncScheduler


def test_a_class_that_no_name_leads_to_is_taken_as_it_is():
    class Local(Scheduler):
        pass

    config = configuration(scheduler_cls=Local)
    scheduler.choose(config)
    made = config.scheduler_config.scheduler_cls
    scheduler.choose(config)
    assert config.scheduler_config.scheduler_cls is made and made.torpor_base is Local


def test_vllms_own_class_has_nothing_of_torpor():
    plugin.activate()
    assert plugin.inactive() is None
    assert not [name for cls in (Scheduler, AsyncScheduler) for name in vars(cls) if name.startswith("torpor")]
    assert Scheduler.schedule.__module__ == Scheduler.has_requests.__module__ == Scheduler.__module__


@pytest.mark.parametrize("given", [f"{HERE}.Foreign", Foreign])
def test_an_engine_with_another_scheduler_is_left_alone(given, monkeypatch):
    from torpor.vllm import configuration as finished

    scheduler._say_foreign.cache_clear()
    said = []
    monkeypatch.setattr(scheduler.logger, "warning", lambda text, *words: said.append(text % words))
    config = configuration(scheduler_cls=given)
    config.model_config = None
    finished.finish(config)
    assert config.scheduler_config.scheduler_cls is given and not holds_memory_of(config)
    assert not holds_memory_by(SimpleNamespace(additional_config={"torpor": {}}, scheduler_cls=given))
    [line] = said
    assert f"{HERE}.Foreign" in line and "leaves this engine alone" in line


def test_a_scheduler_that_cannot_be_imported_is_vllms_to_complain_about():
    assert not holds_memory_of(configuration(scheduler_cls="nowhere.Scheduler"))


@pytest.mark.parametrize("torpor", [{}, {"enabled": False}])
@pytest.mark.parametrize("has_requests", [True, False])
def test_the_engine_cores_loop_asks_another_scheduler_nothing_of_torpor(torpor, has_requests):
    plugin.activate()
    core = EngineCoreProc.__new__(EngineCoreProc)
    core.scheduler = Foreign.__new__(Foreign)
    core.vllm_config = core.scheduler.vllm_config = configuration(torpor=torpor)
    core.scheduler.has_requests = lambda: has_requests
    core.batch_queue, core.engines_running, core.model_executor = None, False, SimpleNamespace()
    assert core.has_work() is has_requests


class Stepping:
    """A scheduler's step, which sees what stands in front of it."""

    def __init__(self, connector):
        self.connector, self.requests = connector, {}
        self.scheduler_config = SimpleNamespace(async_scheduling=False)
        self.parallel_config = SimpleNamespace(pipeline_parallel_size=1)
        self.use_v2_model_runner = False
        self.torpor_slots = False

    def schedule(self):
        return SimpleNamespace(num_scheduled_tokens={})


@pytest.mark.parametrize(
    ("asynchronous", "stages", "v2", "can"),
    [(False, 1, False, True), (True, 1, True, True), (True, 1, False, False), (False, 2, True, False)],
)
def test_loads_end_within_a_step_that_can_be_taken_back(asynchronous, stages, v2, can):
    one = Stepping(None)
    one.scheduler_config.async_scheduling, one.parallel_config.pipeline_parallel_size = asynchronous, stages
    one.use_v2_model_runner = v2
    assert connector_failed.can_take_back(one) == can


@pytest.mark.parametrize(
    ("name", "moved"), [("NixlConnector", False), ("TorporConnector", True), ("TorporAdmit", True), (None, False)]
)
def test_only_beside_torpors_connector_are_requests_moved(monkeypatch, name, moved):
    seen, freed = [], []
    monkeypatch.setattr(scheduler, "let_those_with_blocks_go_first", seen.append)
    monkeypatch.setattr(scheduler, "free_for_others", freed.append)  # nothing was scheduled
    sides = {"TorporConnector": {"scheduler": SimpleNamespace(adapters=None)}, "TorporAdmit": {"admissions": object()}}
    one = scheduler.over(Stepping)(name and type(name, (), sides.get(name, {}))())
    one.schedule()
    assert seen == ([one] if moved else []) and one.torpor_steps == 1
    assert freed == ([one] if name == "TorporConnector" else [])


@pytest.mark.parametrize("inside", [None, (), Mock()])
def test_a_connector_of_somebodys_own_is_not_taken_for_vllms_multi_connector(monkeypatch, inside):
    """Mock stands for one that has an attribute of every name, as in vLLM's own tests of schedulers."""
    monkeypatch.setattr(scheduler, "let_those_with_blocks_go_first", lambda _: pytest.fail("nothing is torpor's"))
    one = scheduler.over(Stepping)(Mock() if isinstance(inside, Mock) else SimpleNamespace(sub_connectors=inside))
    one.schedule()
    assert one.torpor_steps == 1 and connector_sleep.side_of(one) is None


def test_torpors_connector_is_found_inside_vllms_multi_connector():
    ours = type("TorporConnector", (), {"scheduler": SimpleNamespace()})()
    multi = SimpleNamespace(sub_connectors=[object(), ours])
    assert connector_sleep.side_of(scheduler.over(Stepping)(multi)) is ours.scheduler


def test_a_schedule_that_does_not_call_its_base_is_counted_too():
    class Own(Stepping):
        def schedule(self):
            return SimpleNamespace(num_scheduled_tokens={"a": 1})

    one = scheduler.over(Own)(None)
    one.requests = {"a": SimpleNamespace(num_computed_tokens=1)}
    hooks.watch_recomputation(one)
    one.schedule()
    assert one.torpor_steps == 1 and one.torpor_recomputed == 1


@pytest.mark.slow
def test_an_engine_with_a_scheduler_of_somebodys_own_answers_as_without_torpor(zygote, one, tiny_model, tmp_path):
    result = result_of(zygote.run([Path(__file__).with_name("foreign_process.py"), tiny_model, tmp_path]))
    assert result["inactive"] is None and result["scheduler"] == "Foreign"
    assert result["answers"] == json.loads(json.dumps(one.finish(one.begin(0, NAMES)))) and len(result["answers"]) == 2
    assert "torpor does not hold this engine's memory" in result["refused"]
    assert "a scheduler that derives from vLLM's" in result["refused"]
