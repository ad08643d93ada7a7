# SPDX-License-Identifier: Apache-2.0
"""One engine in this process for all tests that need no other; its model is a random tiny Llama."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "gpu_path"))
sys.path.append(str(Path(__file__).parents[2] / "tools/demo"))

import pytest
import gpu_path
from tiny_model import make_model
from zygote import ENVIRONMENT, Zygote, shared, wait_for_orphans

os.environ.update(ENVIRONMENT)

# torch and vLLM, seconds of imports, are imported where they are used: not all tests need them in this process.

ENGINE = {
    "enforce_eager": True, "block_size": 32, "max_model_len": 2048, "max_num_seqs": 16, "max_num_batched_tokens": 128,
    "seed": 0, "dtype": "float32",
}  # fmt: skip


IN_PROOF = os.environ.get("TORPOR_PROOF") == "long"  # tests with the mark "longer" do more there

# The marks of what runs there in tools/dev proof only; on the CPU in each run.
LONG_ON_GPU_PATH = [pytest.mark.cpu, *([pytest.mark.long] if gpu_path.active() else [])]


def long_on_gpu_path(test):
    for mark in LONG_ON_GPU_PATH:
        test = mark(test)
    return test


COLLECTED = pytest.StashKey[list]()  # of each mark "feature": the test's file, the row, its ways


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: more than a few seconds for itself")
    config.addinivalue_line(
        "markers", "gpu_path: on vLLM's GPU path (tests/gpu_path), and on the CPU's in tools/dev proof"
    )
    config.addinivalue_line("markers", "cpu: of the mark gpu_path, on the CPU's path in each run")
    config.addinivalue_line("markers", "long: only in tools/dev proof")
    config.addinivalue_line("markers", "longer: more of it in tools/dev proof")
    config.addinivalue_line("markers", "core: on both paths, and with the other releases of vLLM")
    config.addinivalue_line("markers", "feature(row, *ways): makes the table of features in docs/vllm.md")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Slow tests last: ending an engine in other processes takes vLLM's process groups of this one with it."""
    config.stash[COLLECTED] = [(item.path, *mark.args) for item in items for mark in item.iter_markers("feature")]
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    try:
        return (yield)
    finally:
        if nextitem is not None and nextitem.path != item.path:
            wait_for_orphans()


def pytest_sessionfinish():
    """Orphans that came to this process (zygote.py) and have ended are waited for, so that their time counts as its."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


@pytest.fixture(scope="session")
def real_model() -> Path:
    path = os.environ.get("TORPOR_TEST_MODEL")
    assert path, "TORPOR_TEST_MODEL names no model; run the tests with tools/dev test, or set it to a folder with one"
    return Path(path)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, real_model) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"), real_model)


@pytest.fixture(scope="session")
def gpu_path_model(tmp_path_factory) -> Path:
    from gpu_path import model

    return model.make_model(tmp_path_factory.mktemp("gpu_path"))


@pytest.fixture(scope="session")
def events_dir():
    """Of the one ring that this process has, whichever test begins it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield path


@pytest.fixture(scope="session")
def zygote() -> Zygote:
    """Starts further processes; they have imported vLLM already."""
    return shared()


@pytest.fixture(scope="session")
def gpu_path_zygote():
    """The same, on the GPU path. What it starts needs `env=` with gpu_path.environment()."""
    if gpu_path.active():
        yield shared()
        return
    zygote = Zygote(env=os.environ | gpu_path.environment())
    yield zygote
    zygote.close()


def kept_tags() -> set[str]:
    """What an engine in this process has beside weights, KV and scratch memory, and each sleep saves."""
    return {"runtime", "cudagraph"} if gpu_path.pretends_cuda() else set()


def workspace_tag() -> list[str]:
    """vLLM 0.31 has its workspace in torch's own pool."""
    from vllm.v1.worker.workspace import WorkspaceManager

    return ["workspace"] if "_alloc_context" in WorkspaceManager.__init__.__code__.co_names else []


def tags(weights: str, kv_cache: str, others: str = "attached") -> dict[str, str]:
    """The state of each tag; of all but weights and KV: `others`."""
    own = {*kept_tags(), *workspace_tag()} if gpu_path.pretends_cuda() else set()
    return {"weights": weights, "kv_cache": kv_cache} | dict.fromkeys(own, others)


def result_of(done):
    """What a process of the tests printed after "RESULT"."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def without_weights(model: Path, folder: Path) -> Path:
    """A copy of the model that has all but its weights: what load_format="torpor" starts from."""
    return Path(shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors")))


class InProcess:
    """An LLM whose engine core lives in this process, between runs of the same requests."""

    def __init__(self, model: Path, directory: Path, **options):
        from vllm import LLM

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        torpor = {"checkpoint_dir": str(directory), "retain_checkpoints": 100} | options.pop("torpor", {})
        self.requests: dict | None = options.pop("requests", None)  # of add_requests()
        self.llm = LLM(str(model), additional_config={"torpor": torpor}, **(ENGINE | options))
        self.engine = self.llm.llm_engine
        self.directory = directory
        self._expected: dict | None = None

    @property
    def core(self):
        return self.engine.engine_core.engine_core

    @property
    def runner(self):
        return self.core.model_executor.driver_worker.worker.model_runner

    def begin(self, steps: int = 0, names=None) -> dict:
        """The requests (or those of `names`), from the same start each time; runs `steps` steps."""
        import numpy
        import torch
        from requests_of_tests import add_requests, run

        # A test may have failed between a wake and its reload.
        if self.engine.is_sleeping() and not self.llm.wake_up().fully_awake:
            self.llm.collective_rpc("reload_weights")
            self.llm.wake_up(kv="recompute")
        run(self.engine)
        self.llm.reset_prefix_cache()
        torch.manual_seed(3)
        numpy.random.seed(3)  # model runner V2 draws seeds for unseeded requests
        add_requests(self.engine, names, requests=self.requests)
        for request in self.core.scheduler.requests.values():
            while request.use_structured_output and not request.structured_output_request.is_grammar_ready:
                time.sleep(0.002)  # when it is compiled decides about its first batch
        return run(self.engine, steps)

    def stopped(self) -> dict:
        """Answers to what was in flight when the engine was paused or fell asleep; after them nothing comes."""
        from requests_of_tests import run

        answers = run(self.engine, 1)
        assert self.engine.step() == []
        return answers

    def finish(self, answers: dict) -> dict:
        from requests_of_tests import final, run

        return final(answers | run(self.engine))

    @property
    def expected(self) -> dict:
        """The answers of a run that never slept."""
        if self._expected is None:
            self._expected = self.finish(self.begin())
        return self._expected


@pytest.fixture(scope="session")
def one(tiny_model, tmp_path_factory) -> InProcess:
    return InProcess(
        tiny_model, tmp_path_factory.mktemp("checkpoints"), torpor={"retain_kv_bytes": 1 << 30, "incremental": True}
    )


@pytest.fixture(scope="session")
def with_sessions(tiny_model, tmp_path_factory) -> InProcess:
    """Beside that of other tests, and as long: with the first that ends vLLM ends what both share of a process."""
    from test_sessions import CERTAIN

    directory = tmp_path_factory.mktemp("sessions")
    return InProcess(
        tiny_model, directory, torpor={"sessions": True, "retain_kv_bytes": 1 << 30}, requests=CERTAIN,
        num_gpu_blocks_override=200,
    )  # fmt: skip
