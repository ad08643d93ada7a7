# SPDX-License-Identifier: Apache-2.0
"""Every manifest beside what its release has (tests/golden/vllm), so that no change switches a release off unseen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import vllm
from conftest import result_of

from torpor.vllm import compat
from torpor.vllm.compat import guards, v0_32, v0_33
from torpor.vllm.compat.changes import changed
from torpor.vllm.compat.source import SourceTree

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from devtool import golden, uses

GOLDEN = golden.known()


def problems(parts: dict, release: golden.Golden) -> list[str]:
    return [problem for modules in parts.values() for problem in guards.problems(modules, release)]


def test_every_known_version_has_its_golden_contract():
    assert {".".join(version.split(".")[:2]) for version in GOLDEN} == set(compat.VERSIONS)


@pytest.mark.parametrize("version", GOLDEN)
def test_every_known_release_is_as_its_manifest_says(version):
    assert problems(compat.manifest(version).PARTS, GOLDEN[version]) == []


@pytest.mark.core
def test_the_golden_contract_is_what_this_vllm_has():
    version = vllm.__version__.split("+")[0]
    path = golden.path_of(version)
    tree, parts = SourceTree(Path(vllm.__file__).parent), compat.manifest(version).PARTS
    assert golden.text_of(tree, parts, version, json.loads(path.read_text())["of"]) == path.read_text()


def test_a_signature_that_one_release_has_otherwise_is_seen():
    manager = "vllm.v1.core.kv_cache_manager.KVCacheManager"
    without = {name: change for name, change in v0_33.CHANGES.items() if name != manager}
    parts = changed(v0_32.PARTS, without)
    assert problems(parts, GOLDEN["0.32.0"]) != [] and problems(parts, GOLDEN["0.33.0"]) == [
        f"{manager}.get_computed_blocks takes (self, request, max_cache_hit_length=None), "
        "torpor expects (self, request)"
    ]


def test_what_is_noted_nowhere_is_no_agreement():
    found = guards.problems([guards.Module("vllm.nowhere"), guards.Module("vllm.v1.request", names=("nothing",))],
                            GOLDEN["0.33.0"])  # fmt: skip
    assert "run tools/dev contract 0.33.0 --golden" in found[0] and found[1:] == ["vllm.v1.request has no nothing"]


def test_what_torpor_replaces_takes_what_each_release_gives_it(zygote):
    found = result_of(zygote.run([Path(__file__).with_name("replaced_process.py")]))
    assert found["problems"] == []
    assert "vllm.v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks" in found["seen"]
    assert "vllm.v1.worker.gpu_worker.Worker._maybe_get_memory_pool_context" in found["seen"]
    assert "vllm.compilation.cudagraph_pool.get_mem_allocator_instance" in found["seen"] and len(found["seen"]) > 20


# --- of functions: what they do, and where fields are used ------------------------------------------------------------

TOY = """
class Pool:
    def touch(self, blocks: list) -> int:
        '''Counts.'''
        for block in blocks:
            block.count += 1  # one more
        return sum(block.count for block in blocks)

    def other(self): return self.touch([])
"""


def digest(tmp_path, text: str, name: str = "Pool.touch") -> str | None:
    (folder := tmp_path / "toy").mkdir(exist_ok=True)
    (folder / "__init__.py").write_text(text)
    return golden.digest(SourceTree(folder), f"toy.{name}")


def test_a_digest_is_of_what_a_function_does(tmp_path):
    first = digest(tmp_path, TOY)
    for old, new in (
        (": list) -> int", ")"),
        ("'''Counts.'''", "'''Counts each.'''\n"),
        ("  # one more", ""),
        ("self.touch([])", "None"),
    ):
        assert old in TOY and digest(tmp_path, TOY.replace(old, new)) == first, old
    for old, new in (("+= 1", "+= 2"), ("blocks: list", "blocks: list, more=0"), ("return sum", "yield sum")):
        assert old in TOY and digest(tmp_path, TOY.replace(old, new)) not in (first, None), old
    assert digest(tmp_path, TOY, "Pool.gone") is digest(tmp_path, TOY, "Gone.touch") is None
    assert digest(tmp_path, "class Base:\n    def f(self): return 1\nclass Pool(Base): pass\n", "Pool.f")


def test_every_function_that_torpor_relies_on_is_in_the_newest_release():
    *_, newest = GOLDEN.values()
    assert [name for name, found in newest.bodies.items() if found is None] == []


def test_where_a_field_is_written_and_read(tmp_path):
    (tmp_path / "a.py").write_text("class A:\n    kept: int = 0\n\n    def f(self):\n        self.kept = self.gone\n")
    (tmp_path / "b.py").write_text("A(kept=1)\nx = A().kept\ny = kept\n")
    assert uses.of(tmp_path, {"kept"}) == {
        "kept": {"written": ["a.py:2 (A)", "a.py:5 (A.f)", "b.py:1"], "read": ["b.py:2"]}
    }
