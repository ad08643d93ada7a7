# SPDX-License-Identifier: Apache-2.0
"""Which modules of vLLM the guards import: none whose files are as in a known release, unless somebody changed it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import vllm
from conftest import result_of

from torpor.vllm import compat
from torpor.vllm.compat import unchanged
from torpor.vllm.compat.guards import Module
from torpor.vllm.compat.source import SourceTree
from torpor.vllm.when_imported import when_imported

RELEASE = vllm.__version__.split("+")[0]
LATE = "vllm.v1.worker.gpu_worker"  # its class derives from one of BASE
BASE = "vllm.v1.worker.worker_base"


@pytest.mark.core
def test_the_table_is_what_this_vllm_has():
    table = unchanged.table_of(SourceTree, Path(vllm.__file__).parent, compat.manifest(RELEASE).PARTS)
    assert unchanged.text_of(table) == (unchanged.FOLDER / f"{RELEASE}.json").read_text()


def test_every_known_version_has_its_table():
    releases = {path.stem for path in unchanged.FOLDER.glob("*.json")}
    golden = {path.stem for path in (Path(__file__).parents[1] / "golden/vllm").glob("*.json")}
    assert releases == golden
    for release in releases:
        parts = compat.manifest(release).PARTS
        assert unchanged._known(release).keys() == {module.name for part in parts.values() for module in part}


@pytest.fixture
def copied(monkeypatch, tmp_path) -> Path:
    """LATE as a module that is not imported, in a copy of its files. Return the folder of the package."""
    package = tmp_path / "vllm"
    for file in unchanged._known(RELEASE)[LATE]["files"]:
        to = tmp_path / file
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(vllm.__file__).parents[1] / file, to)
    importlib.import_module(BASE)
    monkeypatch.delitem(sys.modules, LATE, raising=False)
    monkeypatch.setattr(vllm, "__path__", [str(package)])
    unchanged._is_as_on_disk.cache_clear()
    yield package
    unchanged._is_as_on_disk.cache_clear()


def compared(version: str = vllm.__version__) -> list[str]:
    return [module.name for module in unchanged.to_compare([Module(LATE), Module("vllm.nowhere")], version)]


def test_a_module_with_the_files_of_the_release_is_not_imported(copied):
    assert compared() == ["vllm.nowhere"]


@pytest.mark.parametrize("name", [LATE, BASE])
def test_a_module_is_compared_if_a_byte_of_its_files_differs(copied, name):
    path = copied.parent / f"{name.replace('.', '/')}.py"
    path.write_bytes(path.read_bytes() + b"\n")
    assert compared() == [LATE, "vllm.nowhere"]


def test_a_module_is_compared_if_a_file_is_missing(copied):
    (copied / "v1/worker/gpu_worker.py").unlink()
    assert compared() == [LATE, "vllm.nowhere"]


def test_a_module_is_compared_if_it_is_imported_already(copied, monkeypatch):
    monkeypatch.setitem(sys.modules, LATE, object())
    assert compared() == [LATE, "vllm.nowhere"]


def test_a_module_is_compared_if_another_plugin_changed_its_base(copied, monkeypatch):
    monkeypatch.setattr(sys.modules[BASE].WorkerBase, "load_model", lambda self, also: None, raising=False)
    assert compared() == [LATE, "vllm.nowhere"]


@pytest.mark.parametrize("version", ["0.32.99", "0.32.0rc1", "unknown"])
def test_all_is_compared_of_a_release_that_is_not_known(copied, version):
    assert compared(version) == [LATE, "vllm.nowhere"]


@pytest.mark.slow
def test_an_engine_that_asks_imports_no_worker_no_model_and_no_adapters():
    """In a new interpreter: what is forked from the zygote has imported all of vLLM."""
    process = Path(__file__).with_name("unchanged_process.py")
    environment = os.environ | {"VLLM_PLUGINS": "torpor", "VLLM_LOGGING_LEVEL": "ERROR"}
    ran = subprocess.run([sys.executable, process], env=environment, stdout=subprocess.PIPE, text=True, timeout=600)
    found = result_of(ran)
    assert found["inactive"] is None and found["knows"]
    late = (
        "vllm.lora.", "vllm.model_executor.models.", "vllm.model_executor.model_loader", "vllm.v1.sample.",
        "vllm.v1.worker.gpu", "vllm.v1.worker.cpu",
    )  # fmt: skip
    assert [name for name in found["imported"] if name.startswith(late)] == []


# --- what is done when vLLM imports a module --------------------------------------------------------------------------


@pytest.fixture
def late(tmp_path, monkeypatch) -> str:
    """Return the name of a module that nobody has imported."""
    (tmp_path / "torpor_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "torpor_late"
    sys.modules.pop("torpor_late", None)


def test_what_waits_for_an_import_is_done_once_behind_it(late):
    done, finders = [], list(sys.meta_path)
    when_imported(late, lambda: done.append(sys.modules[late].value))
    assert done == [] and late not in sys.modules
    module = importlib.import_module(late)
    importlib.import_module(late)
    assert done == [1] and sys.meta_path == finders
    assert module.__loader__.get_source(late) == "value = 1\n" and module.__spec__.loader is module.__loader__


def test_what_waits_for_an_import_waits_on_behind_a_look_and_a_failed_import(late):
    done, others = [], []
    when_imported(late, lambda: done.append(sys.modules[late].value))
    when_imported(late, lambda: others.append(True))
    file = Path(importlib.util.find_spec(late).origin)  # as who asks whether there is such a module
    file.write_text("raise ImportError('not now')\n")
    with pytest.raises(ImportError, match="not now"):
        importlib.import_module(late)
    assert done == others == []
    file.write_text("value = 1234\n")
    importlib.invalidate_caches()
    importlib.import_module(late)
    assert done == [1234] and others == [True]


def test_what_waits_for_an_import_is_done_at_once_behind_an_earlier_one(late):
    importlib.import_module(late)
    done = []
    when_imported(late, lambda: done.append(True))
    assert done == [True]


def test_an_import_raises_what_waited_for_it_raises(late):
    def fail() -> None:
        raise RuntimeError("not so")

    when_imported(late, fail)
    with pytest.raises(RuntimeError, match="not so"):
        importlib.import_module(late)
