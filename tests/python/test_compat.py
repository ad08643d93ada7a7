# SPDX-License-Identifier: Apache-2.0
"""The manifest of vLLM against the installed one, without an engine; and torpor beside a vLLM that it does not know."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import time
from pathlib import Path

import pytest
import vllm
from conftest import result_of
from vllm import LLM
from vllm.v1.engine.llm_engine import LLMEngine

import torpor
from torpor import errors
from torpor.vllm import compat, front_end_methods
from torpor.vllm.compat import changes, guards, imported, v0_32
from torpor.vllm.compat.guards import Class, Module
from torpor.vllm.patching import Patches

MANIFEST = compat.manifest(vllm.__version__)
ADAPTER = Path(torpor.__file__).parent
EVERYTHING = [module for part in MANIFEST.PARTS.values() for module in part]
WHOLE = [module for part in v0_32.PARTS.values() for module in part]  # that others are written by


# --- the contract -----------------------------------------------------------------------------------------------------


def test_the_installed_vllm_is_as_the_manifest_says(seen):
    """In a process of its own: here, engines of other tests have let torpor change vLLM."""
    assert seen["fits"]["inactive"] is None


def test_the_guards_take_a_moment():
    began = time.process_time()
    guards.problems(EVERYTHING)
    assert time.process_time() - began < 10


def imports_of(path: Path) -> set[tuple[str, str]]:
    """(module, name) of each import or lookup() from vLLM in a file; the name is "" for the module itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("lookup", "compat.lookup"):
            found.add(tuple(argument.value for argument in node.args))
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "vllm":
            found |= {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm"}
    return found


def test_every_name_that_the_adapter_imports_from_vllm_stands_in_the_manifest():
    known = {(module.name, name) for module in WHOLE for name in (*module.imported(), "")}
    known |= {(module.name.rpartition(".")[0], module.name.rpartition(".")[2]) for module in WHOLE}
    for path in sorted(ADAPTER.rglob("*.py")):
        missing = imports_of(path) - known
        assert not missing, f"{path.name} imports {sorted(missing)}: add them to compat/v0_32.py, with a guard"


@pytest.mark.parametrize("known", compat.VERSIONS)
def test_what_has_another_place_in_a_version_is_looked_up(known):
    """Where a name is absent or elsewhere, a plain import of it would end the engine."""
    elsewhere = {
        full
        for full, change in getattr(compat.manifest(known), "CHANGES", {}).items()
        if change is changes.ABSENT or isinstance(change, changes.Moved)
    }
    allowed = {("patches.py", "vllm.compilation.cudagraph_pool")}  # after it asked by a lookup
    for path in sorted(ADAPTER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                named = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                assert {(path.name, name) for name in named & elsewhere} <= allowed, f"{path.name} imports {named}"


def test_every_private_attribute_that_the_adapter_reads_of_another_stands_in_the_manifest():
    manifests = [compat.manifest(version) for version in compat.VERSIONS]
    modules = [module for manifest in manifests for part in manifest.PARTS.values() for module in part]
    known = {name for module in modules for cls in module.classes for name in cls.touched()}
    for path in sorted((ADAPTER / "vllm").rglob("*.py")):
        tree = ast.parse(path.read_text())
        own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_self(node)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
                and not is_self(node)
            ):
                assert node.attr in known | own | OTHERS, (
                    f"{path.name}:{node.lineno} reads .{node.attr}: add it to compat/v0_32.py"
                )


# Private names that are not vLLM's: of torpor's own modules and of the standard library.
OTHERS = {"_core", "_exit", "_forget", "_run"}


def is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_the_fields_of_a_request_that_are_saved_are_those_of_the_manifest():
    from torpor.vllm.scheduler_values import _KNOWN_FIELDS

    [request] = [
        cls
        for module in EVERYTHING
        for cls in module.classes
        if (module.name, cls.name) == ("vllm.v1.request", "Request")
    ]
    assert set(request.fields.split()) <= _KNOWN_FIELDS


# --- differences are found, by name -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (Module("vllm.v1.nowhere"), "vllm.v1.nowhere cannot be used: ModuleNotFoundError"),
        (Module("vllm.v1.request", names=("Wish",)), "vllm.v1.request has no Wish"),
        (Module("vllm.v1.request", classes=(Class("Wish"),)), "vllm.v1.request has no Wish"),
        (
            Module("vllm.v1.core.kv_cache_utils", functions={"get_none_hash_seed": "seed=None"}),
            "vllm.v1.core.kv_cache_utils.get_none_hash_seed takes (), torpor expects (seed=None)",
        ),
        (
            Module(
                "vllm.v1.core.block_pool",
                classes=(Class("BlockPool", {"free_blocks": "self, ordered_blocks, prepend=False"}),),
            ),
            "BlockPool.free_blocks takes (self, ordered_blocks",
        ),
        (
            Module("vllm.v1.core.block_pool", classes=(Class("BlockPool", {"free_all": "self"}),)),
            "BlockPool.free_all does not exist",
        ),
        (
            Module("vllm.v1.request", classes=(Class("Request", fields="request_id wishes"),)),
            "Request has no field wishes",
        ),
        (
            Module("vllm.v1.request", classes=(Class("RequestStatus", members="WISHING"),)),
            "RequestStatus has no WISHING",
        ),
        (
            Module("vllm.v1.request", classes=(Class("Request", properties="append_output_token_ids"),)),
            "append_output_token_ids is no property",
        ),
    ],
)
def test_what_is_missing_or_changed_is_named(module, named):
    [problem] = guards.problems([module])
    assert named in problem


@pytest.mark.parametrize(
    ("module", "cls"),
    [(module.name, cls) for module in EVERYTHING for cls in module.classes if cls.exact],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_field_that_the_manifest_does_not_know_is_named(module, cls):
    *rest, last = cls.fields.split()
    problems = guards.problems([Module(module, classes=(Class(cls.name, fields=" ".join(rest) or " ", exact=True),))])
    assert [f"{module}.{cls.name} has a field {last} that torpor does not know"] == [
        p for p in problems if "does not know" in p
    ]


def test_fields_are_found_wherever_a_class_declares_or_assigns_them():
    def fields(module: str, name: str) -> set[str]:
        return imported.module(module).cls(name).fields()

    assert "ref_cnt" in fields("vllm.v1.core.kv_cache_utils", "KVCacheBlock")  # a dataclass
    assert "cache_salt" in fields("vllm.v1.engine", "EngineCoreRequest")  # msgspec
    assert "selected_token_ranks" in fields("vllm.v1.outputs", "LogprobsTensors")  # a named tuple
    assert "input_batch" in fields("vllm.v1.worker.cpu_model_runner", "CPUModelRunner")  # assigned in a base


# --- all patches or none ----------------------------------------------------------------------------------------------


def test_patches_are_taken_back_in_full():
    class Base:
        def inherited(self):
            return "base"

    class Stock(Base):
        def own(self):
            return "stock"

    own = vars(Stock)["own"]
    patches = Patches()
    patches.set(Stock, "own", lambda self: "ours")
    patches.set(Stock, "own", lambda self: "ours again")
    patches.set(Stock, "inherited", lambda self: "ours")
    patches.set(Stock, "new", 1)
    assert (Stock().own(), Stock().inherited(), Stock.new) == ("ours again", "ours", 1)
    patches.undo()
    assert vars(Stock)["own"] is own and Stock().inherited() == "base"
    assert "inherited" not in vars(Stock) and not hasattr(Stock, "new")


# --- beside a vLLM that torpor does not know --------------------------------------------------------------------------

OTHER_VERSION = 'vllm.__version__ = "0.99.1"'
OTHER_SIGNATURE = """
from vllm.v1.engine.core import EngineCore
def pause_scheduler(self, mode="abort", clear_cache=True, drain=False): pass
EngineCore.pause_scheduler = pause_scheduler
"""
OTHER_FIELD = """
import dataclasses
from vllm.v1.worker import gpu_input_batch
stock = gpu_input_batch.CachedRequestState
fields = [("brand_new", int, 0)]
gpu_input_batch.CachedRequestState = dataclasses.make_dataclass("CachedRequestState", fields, bases=(stock,))
gpu_input_batch.CachedRequestState.__module__ = "vllm.v1.worker.gpu_input_batch"
"""
POOL_FIELD = (
    OTHER_FIELD.replace("gpu_input_batch", "kv_cache_utils")
    .replace("v1.worker", "v1.core")
    .replace("CachedRequestState", "KVCacheBlock")
)
FAILS_HALF_WAY = """
from torpor.vllm import patches
def fail(): raise RuntimeError("half\\nway")
patches._loader = fail
"""
OTHER_PLATFORM = """
from vllm.platforms import current_platform
type(current_platform).is_cpu = lambda self: False
"""
OTHER_SERVER = "from vllm.entrypoints.launchers.api_server import entry\ndel entry.run_server"

CASES = {
    "version": {"change": OTHER_VERSION},
    "signature": {"change": OTHER_SIGNATURE},
    "missing": {
        "change": "from vllm.v1.engine import output_processor\ndel output_processor.RequestOutputCollector.get_nowait"
    },
    "field": {"change": OTHER_FIELD},
    "field of the pool": {"change": POOL_FIELD},
    "half way": {"change": FAILS_HALF_WAY},
    "platform": {"change": OTHER_PLATFORM},
    "off": {"environment": {"TORPOR_ENABLED": "0"}},
    "off for this engine": {"additional_config": {"torpor": {"enabled": False}}},
    "server": {"change": OTHER_SERVER},
    "fits": {},
    "nobody asks": {"additional_config": {}},
    "nobody asks beside another version": {"additional_config": {}, "change": OTHER_VERSION},
    "the environment asks": {"additional_config": {}, "environment": {"TORPOR_CHECKPOINT_DIR": "/nowhere"}},
}
# What is set wherever torpor is installed, so that an engine can ask.
WATCHED = {"VllmConfig._post_init_kv_transfer_config", "CpuPlatform.is_sleep_mode_available"}


@pytest.fixture(scope="module")
def seen(zygote) -> dict[str, dict]:
    """What each of CASES showed, by its name."""
    asking = {"change": "", "environment": {}, "additional_config": {"torpor": {}}}
    cases = [asking | case for case in CASES.values()]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_PLUGINS": "torpor"}
    process = Path(__file__).with_name("compat_process.py")
    results = result_of(zygote.run([process, json.dumps(cases)], env=environment))
    return dict(zip(CASES, results, strict=True))


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("version", "torpor is for vLLM 0.31, 0.32, 0.33, this is 0.99.1"),
        ("signature", "EngineCore.pause_scheduler takes (self, mode='abort', clear_cache=True, drain=False)"),
        ("missing", "RequestOutputCollector.get_nowait does not exist"),
        ("field of the pool", "KVCacheBlock has a field brand_new that torpor does not know"),
        ("half way", "RuntimeError: half way"),
        ("platform", "the platform is CpuPlatform"),
    ],
)
def test_beside_another_vllm_nothing_is_changed_and_one_line_says_so(seen, case, named):
    found = seen[case]
    assert set(found["touched"]) <= WATCHED, found
    assert (
        len(found["said"]) == 1
        and "torpor is inactive in this process" in found["said"][0]
        and named in found["said"][0]
    ), found
    assert found["routes"] == 0
    assert len(found["refused"]) == 3 and all(named in text for text in found["refused"]), found


def test_a_field_that_only_a_new_process_would_lose_leaves_torpor_on(seen):
    found = seen["field"]
    assert found["inactive"] is None and found["routes"] > 0 and "LLM.llm_engine" in found["touched"], found
    [line] = found["said"]
    assert "without checkpoints and new processes" in line and "CachedRequestState has a field brand_new" in line


def test_switched_off_nothing_is_changed_and_nothing_is_said(seen):
    assert seen["off"]["touched"] == [] and seen["off"]["said"] == [] and seen["off"]["routes"] == 0, seen["off"]
    assert all("TORPOR_ENABLED" in text for text in seen["off"]["refused"])


def test_switched_off_for_one_engine_its_server_is_vllms_own(seen):
    found = seen["off for this engine"]
    assert set(found["touched"]) == WATCHED and found["said"] == [] and found["routes"] == 0, found


@pytest.mark.parametrize("case", ["nobody asks", "nobody asks beside another version"])
def test_where_no_engine_asks_vllm_is_as_it_was(seen, case):
    found = seen[case]
    assert set(found["touched"]) == WATCHED and found["said"] == [] and found["routes"] == 0, found


def test_an_option_in_the_environment_asks_for_all_engines(seen):
    found = seen["the environment asks"]
    assert found["inactive"] is None and found["routes"] > 0 and "LLM.llm_engine" in found["touched"], found


def test_where_only_the_server_differs_the_engine_has_torpor_and_its_server_has_not(seen):
    found = seen["server"]
    assert found["inactive"] is None and "EngineCoreProc.has_work" in found["touched"] and found["routes"] == 0
    [line] = found["said"]
    assert "run_server" in line


def test_where_it_fits_it_is_active(seen):
    found = seen["fits"]
    assert found["inactive"] is None and found["said"] == [] and found["refused"] == [] and found["routes"] > 0
    assert {
        "LLM.llm_engine",
        "LLMEngine.__init__",
        "AsyncLLM.__init__",
        "EngineCoreProc.has_work",
    } <= set(found["touched"])
    assert not [name for name in found["touched"] if name.startswith(("Scheduler.", "BlockPool.", "Worker."))]


# --- the arguments are visible ----------------------------------------------------------------------------------------


def test_an_unknown_argument_is_refused_and_named(one):
    with pytest.raises(TypeError, match="speed"):
        one.llm.sleep(level=1, speed=9)
    assert not one.llm.is_sleeping()


SEMANTICS = (Path(__file__).parents[2] / "docs/semantics.md").read_text()
CALLS = re.sub(r"\n +", " ", SEMANTICS.split("```")[1])  # one a line


@pytest.mark.parametrize("methods", [front_end_methods.Blocking, front_end_methods.Awaited])
@pytest.mark.parametrize("name", ["sleep", "wake_up", "updating_weights", "checkpoint"])
def test_signatures_are_those_of_the_document(methods, name):
    [documented] = [line for line in CALLS.splitlines() if line.startswith(f"{name}(")]
    found = imported.signature_text(getattr(methods, name)).removeprefix("self").removeprefix(", ")
    assert f"{name}({found})".replace("'", '"') == documented
    parameters = list(inspect.signature(getattr(methods, name)).parameters)[1:]
    for parameter in parameters:
        assert f"\n    {parameter}: " in getattr(methods, name).__doc__, f"{name}() does not say what {parameter} is"


def test_what_front_ends_got_shows_its_arguments(one):
    for front_end in (one.llm, one.engine):
        for name in ("sleep", "wake_up", "updating_weights", "checkpoint"):
            method = getattr(front_end, name)
            assert method.__func__ is getattr(front_end_methods.Blocking, name) and method.__doc__


def test_an_engine_that_asks_is_an_object_of_vllms_class_and_the_classes_stay_vllms(one):
    assert isinstance(one.llm, LLM) and isinstance(one.engine, LLMEngine)
    assert (type(one.llm).__name__, type(one.engine).__name__) == ("LLM", "LLMEngine")
    assert "torpor" not in vars(LLM) and LLM.sleep.__module__ == LLM.__module__


def test_a_version_that_is_not_known_is_named():
    with pytest.raises(errors.Unsupported, match=r"0.30.4"):
        compat.manifest("0.30.4")
