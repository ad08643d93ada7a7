# SPDX-License-Identifier: Apache-2.0
"""Where the platform is CUDA: how torpor is switched on there, and an engine and servers that start to their end and go
on over a sleep (TORPOR_GPU_PATH_CUDA=1: the platform is CUDA to torpor alone). Nothing here is a GPU."""

import asyncio
import inspect
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import gpu_path
from conftest import result_of
from servers import ALICE, Client, Reading, Server, sampling

from torpor import errors
from torpor.vllm import configuration
from torpor.vllm.options import holds_memory_by, holds_memory_of

HERE = Path(__file__).parent
PRESERVING = {"gpu_preserve_state": True}


# --- which arguments switch it on -------------------------------------------------------------------------------------


@pytest.fixture
def on_cuda(monkeypatch):
    import vllm.model_executor.model_loader  # noqa: F401, before the platform is another: on CUDA it wants kernels
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    for name in [name for name in os.environ if name.startswith("TORPOR_")]:
        monkeypatch.delenv(name)


def finished(torpor, enable_sleep_mode=False, sleep_mode_backend="cumem", **options):
    """An engine's configuration as vLLM finishes it; twice, as for its workers."""
    model = SimpleNamespace(
        enable_sleep_mode=enable_sleep_mode, sleep_mode_backend=sleep_mode_backend, enable_cumem_allocator=False,
        **options,
    )  # fmt: skip
    config = SimpleNamespace(
        additional_config=None if torpor is None else {"torpor": torpor},
        model_config=model,
        kv_transfer_config=None,
        scheduler_config=SimpleNamespace(scheduler_cls=None, async_scheduling=True),
        parallel_config=SimpleNamespace(worker_cls="vllm.v1.worker.gpu_worker.Worker"),
    )
    configuration.finish(config)
    configuration.finish(config)
    return config


def test_preserving_state_switches_vllms_sleep_mode_on_with_torpors_memory(on_cuda):
    """vLLM 0.32 has no argument for the backend, 0.33 has one; neither is needed."""
    for options in ({}, {"enable_sleep_mode": True}, {"enable_sleep_mode": True, "sleep_mode_backend": "torpor"}):
        config = finished(PRESERVING, **options)
        model = config.model_config
        assert (model.enable_sleep_mode, model.sleep_mode_backend, model.enable_cumem_allocator) == (
            True,
            "torpor",
            True,
        )
        assert (
            holds_memory_of(config) and config.scheduler_config.scheduler_cls == "torpor.vllm.scheduler.AsyncScheduler"
        )


def test_an_engine_that_names_torpor_has_vllms_sleep_mode_over_its_memory(on_cuda):
    config = finished({}, enable_sleep_mode=True)
    assert config.model_config.sleep_mode_backend == "torpor"
    assert not holds_memory_of(config) and config.scheduler_config.scheduler_cls is None


@pytest.mark.parametrize(
    ("torpor", "enable_sleep_mode"), [(None, True), ({}, False), ({"enabled": False, **PRESERVING}, True)]
)
def test_an_engine_that_does_not_ask_stays_as_it_is(on_cuda, torpor, enable_sleep_mode):
    config = finished(torpor, enable_sleep_mode)
    model = config.model_config
    assert (model.enable_sleep_mode, model.sleep_mode_backend) == (enable_sleep_mode, "cumem")
    assert not model.enable_cumem_allocator and config.scheduler_config.scheduler_cls is None
    assert not holds_memory_of(config)


def test_another_backend_beside_preserving_state_is_refused_by_name(on_cuda):
    with pytest.raises(errors.InvalidArgument, match="gpu_preserve_state beside sleep_mode_backend='theirs'"):
        finished(PRESERVING, enable_sleep_mode=True, sleep_mode_backend="theirs")


def test_communicators_that_are_to_sleep_are_refused_by_name(on_cuda):
    with pytest.raises(errors.InvalidArgument, match="gpu_preserve_state beside enable_nccl_comm_suspend"):
        finished(PRESERVING, enable_nccl_comm_suspend=True)


def test_torpors_backend_without_its_memory_is_refused(on_cuda, monkeypatch):
    """It would free nothing, and say that it had."""
    from torpor.vllm import asking, plugin
    from vllm.config import VllmConfig
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    made = {}
    monkeypatch.setattr(VllmConfig, "_post_init_kv_transfer_config", lambda self: None)
    monkeypatch.setattr(SleepModeBackendFactory, "register_backend", lambda *_: None)
    asking.watch(SimpleNamespace(set=lambda _, name, value: made.update({name: value})))
    for name, value in (("activate", False), ("memory_fits", False), ("inactive", "vLLM is not as expected")):
        monkeypatch.setattr(plugin, name, lambda value=value: value)
    model = SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="torpor")
    with pytest.raises(errors.Unsupported, match="vLLM is not as expected"):
        made["_post_init_kv_transfer_config"](SimpleNamespace(additional_config={}, model_config=model))
    model.sleep_mode_backend = "cumem"
    made["_post_init_kv_transfer_config"](SimpleNamespace(additional_config={}, model_config=model))


def test_a_server_knows_it_before_its_engine_is_there(on_cuda, monkeypatch):
    def args(torpor, **more):
        return SimpleNamespace(additional_config={"torpor": torpor}, scheduler_cls=None, **more)

    assert holds_memory_by(args(PRESERVING)) and holds_memory_by(args(PRESERVING, sleep_mode_backend="torpor"))
    assert not holds_memory_by(args({})) and not holds_memory_by(args({"enabled": False, **PRESERVING}))
    assert not holds_memory_by(args(PRESERVING, sleep_mode_backend="theirs"))
    monkeypatch.setenv("TORPOR_GPU_PRESERVE_STATE", "1")
    assert holds_memory_by(SimpleNamespace(additional_config=None))


def test_the_memory_of_each_device_offers_what_is_asked_of_one(monkeypatch):
    """An attribute that one of them lacks would end the engine on that device alone."""
    from torpor import _core
    from torpor.vllm.gpu_memory import GpuWorkerMemory
    from torpor.vllm.memory import CpuWorkerMemory
    from torpor.vllm.worker_memory import WorkerMemory

    monkeypatch.setattr(_core, "memory_of", lambda device, options: None)
    both = (CpuWorkerMemory(None, 0, "packed"), GpuWorkerMemory(SimpleNamespace(index=0), {}))
    asked = {*WorkerMemory.__annotations__, *(name for name in vars(WorkerMemory) if not name.startswith("_"))}
    assert {"allocating", "describe_kv", "kv_is_bf16", "new_weights", "rank_memory"} <= asked
    for memory in both:
        assert {name for name in asked if not hasattr(memory, name)} == set(), type(memory).__name__
        for name in asked - set(WorkerMemory.__annotations__):
            own, wanted = getattr(type(memory), name), getattr(WorkerMemory, name)
            assert own is not wanted, f"{type(memory).__name__}.{name}"
            assert list(inspect.signature(own).parameters) == list(inspect.signature(wanted).parameters), name


def test_what_is_asked_of_a_workers_memory_stands_in_the_protocol():
    import ast

    from torpor.vllm import connector_worker, patches, worker
    from torpor.vllm.worker_memory import WorkerMemory

    asked = {*WorkerMemory.__annotations__, *vars(WorkerMemory)}
    for module in (worker, connector_worker, patches):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in (
                "torpor_memory",
                "_memory",
            ):
                assert node.attr in asked, f"{module.__name__}:{node.lineno} asks for {node.attr}"


# --- on the GPU path --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(gpu_path_zygote, gpu_path_model, tmp_path_factory) -> dict:
    words = [HERE / "cuda_process.py", gpu_path_model, tmp_path_factory.mktemp("checkpoints")]
    return result_of(gpu_path_zygote.run(words, env=os.environ | gpu_path.environment(cuda=True)))


@pytest.mark.slow
@pytest.mark.gpu_path
def test_an_engine_has_the_memory_of_a_gpu(engine):
    assert engine["in_force"] == {
        "memory": "GpuWorkerMemory",
        "scheduler": "torpor.vllm.scheduler",
        "backend": "torpor",
        "sleep_mode": True,
        "tags": ["cudagraph", "kv_cache", "runtime", "weights", "workspace"],
        "weights_in_regions": True,
    }


@pytest.mark.slow
@pytest.mark.gpu_path
def test_what_is_freed_in_a_pool_is_given_back(engine):
    """At the end of its region, and when the next one of its tag begins. A pool has segments of at least this size."""
    assert engine["given_back"] == {
        "at_the_end": True, "not_before": True, "at_the_next": True, "workspaces": 1280 << 10,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.gpu_path
def test_an_engine_that_ends_leaves_nothing_to_the_next_of_its_process(engine):
    for left in (engine["left_by_the_first"], engine["left_by_the_second"]):
        assert "model" not in left["alive"]
        assert set(left["tags"]) <= {"weights", "runtime"}  # vLLM keeps tensors of its own, as of a model it reloaded
    assert engine["dtype"] == "torch.bfloat16"


@pytest.mark.slow
@pytest.mark.gpu_path
def test_its_requests_go_on_over_sleeps_and_from_checkpoints(engine):
    assert engine["differing"] == [] and engine["recomputed"] == 0 and engine["answers"] == 6


class ServerOnGpuPath(Server):
    """A server whose processes are forked from one on the GPU path."""

    zygote = None

    def _launch(self, command, out):
        return self.zygote.popen(command[1:], env=self._environment, stdout=out, stderr=out)

    def become_vllms_own(self) -> None:
        """The same by `vllm serve`, which finds torpor's routes by its plugin."""
        command = ["vllm.entrypoints.cli.main", "serve"]
        at, end = self._command.index("torpor.vllm.serve"), self._command.index("--torpor-checkpoint-dir")
        self._environment |= {"VLLM_PLUGINS": "torpor,torpor_gpu_path", "TORPOR_CHECKPOINT_DIR": self._command[end + 1]}
        self._command = [*self._command[:at], *command, *self._command[at + 1 : end], *self._command[end + 2 :]]


@pytest.mark.slow
@pytest.mark.gpu_path
@pytest.mark.parametrize("kind", [pytest.param("torpor.vllm.serve", marks=pytest.mark.long), "vllm serve"])
def test_a_server_starts_and_its_streams_go_on_over_a_sleep(gpu_path_zygote, gpu_path_model, tmp_path, kind):
    own = {"VLLM_LOGGING_LEVEL": "INFO", "PYTHONHASHSEED": "0"}
    options = ["--dtype", "float32", "--max-num-seqs", "8"]
    if kind == "torpor.vllm.serve":
        options.append("--torpor-gpu-preserve-state")
    else:  # with torpor's KV connector, which asks more of a worker's memory
        torpor = PRESERVING | {"offload": "eager", "host_bytes": 64 << 20}
        options += ["--additional-config", json.dumps({"torpor": torpor})]
    server = ServerOnGpuPath(
        gpu_path_model, tmp_path / "torpor", options, own | gpu_path.environment(cuda=True), keys=(ALICE,)
    )
    server.zygote = gpu_path_zygote
    if kind == "vllm serve":
        server.become_vllms_own()
    server.start()
    try:
        server.wait_until_ready()
        asyncio.run(asyncio.wait_for(over_a_sleep(server.url), 600))
    finally:
        server.stop()


async def over_a_sleep(url: str) -> None:
    client = Client(url, ALICE)
    try:
        expected, readings = ([Reading(f"{name}{number}") for number in range(3)] for name in "es")
        for these in (expected, readings):
            begun = [
                asyncio.create_task(client.chat(reading, "la la la", **sampling(number, 60)))
                for number, reading in enumerate(these)
            ]
            if these is readings:
                while not all(reading.text for reading in readings):
                    await asyncio.sleep(0.01)
                report = await client.post("/sleep", level=1)
                assert report["status"] == "sleeping" and report["requests"] > 0
                state = (await client.http.get("/torpor/state")).json()
                assert set(state["engine"]["tags"]) == {"cudagraph", "kv_cache", "runtime", "weights", "workspace"}
                assert set(state["engine"]["tags"].values()) == {"detached"}
                assert (await client.post("/wake_up"))["status"] == "awake"
            await asyncio.gather(*begun)
        assert [reading.text for reading in readings] == [reading.text for reading in expected]
        assert all(reading.text and reading.interruptions == 0 for reading in readings)
    finally:
        await client.close()


@pytest.mark.slow
@pytest.mark.gpu_path
def test_where_requests_cannot_be_kept_vllms_sleep_mode_still_has_torpors_memory(
    gpu_path_zygote, gpu_path_model, tmp_path
):
    words = [HERE / "memory_alone_process.py", gpu_path_model, tmp_path]
    result = result_of(gpu_path_zygote.run(words, env=os.environ | gpu_path.environment(cuda=True)))
    tiers = result["tiers"]
    assert tiers.pop("memory") is None
    assert all("BlockPool.free_blocks takes (self, ordered_blocks, also=None)" in why for why in tiers.values()), tiers
    assert [line for line in result["said"] if "keeps no requests over a sleep" in line]
    assert result["backend"] == "torpor" and result["worker"] == "torpor.vllm.memory_worker, False"
    assert all(result["awake"].values()) and {"weights", "kv_cache", "runtime"} <= result["awake"].keys()
    assert not any(result["asleep"].values()) and result["same"]
