# SPDX-License-Identifier: Apache-2.0
"""docs/adapter.md says where each attribute is that torpor once set on vLLM's classes: row by row it is so."""

import re
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from torpor.vllm import plugin

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/adapter.md").read_text()
MODULES = {
    "AsyncLLM": "v1.engine.async_llm",
    "BlockPool": "v1.core.block_pool",
    "CPUModelRunner": "v1.worker.cpu_model_runner",
    "CPUWorker": "v1.worker.cpu_worker",
    "CpuPlatform": "platforms.cpu",
    "EngineCore": "v1.engine.core",
    "EngineCoreProc": "v1.engine.core",
    "InprocClient": "v1.engine.core_client",
    "KVCacheManager": "v1.core.kv_cache_manager",
    "LLM": "entrypoints.llm",
    "LLMEngine": "v1.engine.llm_engine",
    "MPClient": "v1.engine.core_client",
    "RequestState": "v1.engine.output_processor",
    "Scheduler": "v1.core.sched.scheduler",
    "StructuredOutputManager": "v1.structured_output",
    "VllmConfig": "config",
    "Worker": "v1.worker.gpu_worker",
    "WorkerLoRAManager": "lora.worker_manager",
}
# Set for an engine that asks, in each process where one does.
SINCE = {"LLMEngine.__init__", "AsyncLLM.__init__", "LLM.llm_engine"}
ON_A_GPU = {"VllmConfig.use_cumem_cudagraph_pool"}  # also where an earlier test of this process made one up


class Row(NamedTuple):
    attribute: str
    state: str
    now: list[str]
    tests: list[int]


def rows(heading: str) -> list[Row]:
    """Return the rows of the table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [
        Row(attribute, state, re.findall("`([^`]+)`", now), [int(number) for number in tests.split(", ")])
        for attribute, state, now, tests in cells
    ]


THE_61 = rows("The 61")
ON_OBJECTS = rows("Not on classes")
TESTS = dict(re.findall(r"^(\d+)\. `(test_\w+\.py::test_\w+)`", PAGE, re.M))


def owner_and_name(row: Row) -> tuple[type, str]:
    owner, _, name = row.attribute.strip("`").partition(".")
    return getattr(import_module(f"vllm.{MODULES[owner]}"), owner), name


def found(path: str):
    """Return what has this path below torpor.vllm. Raises AttributeError or AssertionError where nothing has."""
    parts = path.split(".")
    for split in range(len(parts), 0, -1):
        try:
            value = import_module(".".join(["torpor.vllm", *parts[:split]]))
        except ModuleNotFoundError:
            continue
        for name in parts[split:]:
            value = getattr(value, name)
        return value
    raise AssertionError(f"torpor.vllm has no {path}")


def is_torpors(value) -> bool:
    """Whether a function, or what a property gets, was written by torpor."""
    function = getattr(value, "fget", value)
    return getattr(function, "__globals__", {}).get("__name__", "").startswith("torpor")


def test_the_page_has_each_attribute_once():
    attributes = [row.attribute for row in THE_61]
    assert len(set(attributes)) == len(attributes) == 61
    assert {attribute.strip("`").partition(".")[0] for attribute in attributes} == set(MODULES)
    assert len(ON_OBJECTS) == 11
    assert {row.state for row in THE_61 + ON_OBJECTS} == {"kept", "moved", "gone"}


@pytest.mark.parametrize("row", THE_61 + ON_OBJECTS, ids=lambda row: row.attribute)
def test_what_a_row_names_is_there(row):
    assert row.now and row.tests
    for path in row.now:
        found(path)
    for number in row.tests:
        file, _, test = TESTS[str(number)].partition("::")
        assert f"def {test}(" in (ROOT / "tests/python" / file).read_text(), TESTS[str(number)]


@pytest.mark.parametrize("row", THE_61, ids=lambda row: row.attribute)
def test_what_is_not_kept_is_not_set_on_vllms_class(row):
    plugin.activate()
    assert plugin.inactive() is None
    owner, name = owner_and_name(row)
    value = vars(owner).get(name)
    if row.state == "kept":
        assert is_torpors(value)
    elif name.startswith("torpor"):
        assert not hasattr(owner, name)
    else:
        assert not is_torpors(value)


def test_and_no_other_of_these_classes_has_more_than_the_page_says():
    plugin.activate()
    classes = {owner for owner, _ in map(owner_and_name, THE_61)}
    ours = {f"{cls.__name__}.{name}" for cls in classes for name, value in vars(cls).items() if is_torpors(value)}
    assert ours - ON_A_GPU == SINCE | {row.attribute.strip("`") for row in THE_61 if row.state == "kept"}
    assert all(f"`{name}`" in PAGE.partition("## New since")[2] for name in SINCE)


def test_each_test_of_the_page_is_named_by_a_row():
    assert {str(number) for row in THE_61 + ON_OBJECTS for number in row.tests} == set(TESTS)
