# SPDX-License-Identifier: Apache-2.0
"""Documents name only what exists, sources keep to their folders, and the checks themselves find what they should."""

import re
import shutil
import subprocess
import tomllib

import pytest
from conftest import ROOT
from devtool import checks, commands, documents
from devtool.replaced_names import replaced_names


def test_documents_and_sources_are_in_order():
    assert checks.all_problems(ROOT) == []


def test_members_of_classes_that_documents_name_exist(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "queue.h").write_text("class Queue {\n  void push();\n};\n")
    (tmp_path / "page.md").write_text("`Queue::push`, `Queue::push()`, `std::move` and `torpor::queue`\n")
    assert checks.missing_members(tmp_path) == []
    (tmp_path / "page.md").write_text("`Queue::pop()`\n")
    assert checks.missing_members(tmp_path) == ["page.md: names Queue::pop, which does not exist"]


def test_every_folder_has_a_readme():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    folders = {name.split("/")[0] for name in tracked if "/" in name and not name.startswith(".")} - {"docs", "cmake"}
    folders |= {"tools/" + name.split("/")[1] for name in tracked if name.startswith("tools/") and name.count("/") > 1}
    missing = [folder for folder in sorted(folders) if not (ROOT / folder / "README.md").exists()]
    assert missing == []


def test_i11_nothing_in_the_library_ends_the_process(tmp_path):
    assert checks.ends_the_process(ROOT) == []
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "engine").mkdir()
    for line in ("std::abort();", "if (bad) exit(1);", "  assert(size > 0);", "~Region() noexcept(false);"):
        (tmp_path / "engine/ends.cpp").write_text(f"{line}\n")
        assert len(checks.ends_the_process(tmp_path)) == 1, line
    (tmp_path / "engine/ends.cpp").write_text("// abort()\nbool Engine::abort(int id);\nengine->abort(id);\n")
    assert checks.ends_the_process(tmp_path) == []


def test_s4_the_scheduler_reaches_no_bytes_and_ranks_no_decisions():
    """By what each side's sources include, and what those do."""
    folder = [name for name in checks.includes(ROOT) if name.startswith("kvcache/")]
    scheduler = [
        name for name in folder if re.search("offload_(scheduler|calls|commit|queue)|block_index|placement", name)
    ]
    ranks = [name for name in folder if re.search("offload_(worker|job)", name)]
    assert len(scheduler) > 10 and len(ranks) > 3
    reached = checks.reached(ROOT, scheduler)
    bytes_of_ranks = {"allocator/device_memory.h", "base/file_system.h", "kvcache/kv_layout.h", *ranks}
    assert {name for name in reached if name in bytes_of_ranks or name.startswith("allocator/")} == set()
    assert {name for name in reached if name.startswith("offload/")} <= {
        "offload/block_key.h", "offload/outcome.h", "offload/transfer_priority.h"
    }  # fmt: skip
    decisions = {*scheduler, "kvcache/device_blocks.h", "kvcache/block_pool.h", "kvcache/key_table.h"}
    assert checks.reached(ROOT, ranks) & decisions == set()


def test_every_promise_has_a_test_of_its_number(tmp_path):
    assert checks.broken_promises(ROOT) == []
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/some_test.cpp").write_text("TEST(Some, I1S2Holds) {\nTEST(Some, S12Holds) {\n")
    page = "- **I1** One.\n  - `some_test.cpp::I1S2Holds`\n- **S2** Two.\n  - `some_test.cpp::I1S2Holds`\n"
    page += "- **S1** One.\n  - `some_test.cpp::S12Holds`\n- **S12** Last.\n  - `some_test.cpp::S12Gone`\n"
    (tmp_path / "tests/promises.md").write_text(page)
    found = "\n".join(checks.broken_promises(tmp_path))
    for number in ("I1", "S2"):
        assert f"no test has {number} in its name" not in found
    for number in ("S1", "I2", "P6"):
        assert f"no test has {number} in its name" in found
    assert "no test S12Gone in some_test.cpp" in found


def test_each_proof_of_the_console_names_tests_and_faults_that_there_are():
    table = (ROOT / "tests/console.md").read_text()
    named = re.findall(r"`([\w/]+\.(?:cpp|py))::(\w+)`", table)
    for file, name in named:
        text = (ROOT / "tests" / file).read_text()
        assert re.search(rf"(?:TEST\w*\(\s*\w+,|def)\s+{name}\b", text), f"{file}::{name}"
    faults = {mutant["name"] for mutant in tomllib.loads((ROOT / "tests/mutants.toml").read_text())["mutant"]}
    planted = set(re.findall(r'"([^"]+)"', table))
    assert len(named) > 50 and len(planted) > 20 and planted <= faults, planted - faults


def test_the_checks_find_planted_problems(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "base").mkdir()
    (tmp_path / "README.md").write_text("See `base/none.h` and [this](docs/none.md), and `base/here.h`.")
    (tmp_path / "base/here.h").write_text("#include <pybind11/pybind11.h>\n")
    (tmp_path / "base/use.py").write_text("import pickle\n\nprint('take up {id}', f'{pickle}', '{a}'.format(a=1))\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/mutants.toml").write_text(
        '[[mutant]]\nname = "stale"\nfile = "base/here.h"\nreplace = "gone"\n\n'
        '[[mutant]]\nname = "fresh"\nfile = "base/here.h"\nreplace = "pybind11/pybind11"\n'
        'caught_by = "base_test Ways/Here.Is*"\n\n'
        '[[mutant]]\nname = "unseen"\nfile = "base/here.h"\nreplace = "pybind11/pybind11"\n'
        'caught_by = "pytest tests/test_here.py::test_gone"\n\n'
        '[[mutant]]\nname = "unnoticed"\nfile = "base/here.h"\nreplace = "pybind11/pybind11"\n'
        'caught_by = "base_test Here.Was*"\n'
    )
    (tmp_path / "tests/here_test.cpp").write_text("TEST_P(Here, IsThere) {}\n")
    (tmp_path / "tests/test_here.py").write_text("def test_here():\n    pass\n")
    found = "\n".join(checks.all_problems(tmp_path))
    for part in (
        "base/none.h",
        "docs/none.md",
        "pybind11",
        "imports pickle",
        "'stale'",
        "no test pytest tests/test_here.py::test_gone",
        "no test base_test Here.Was*",
        "base/use.py:3: nothing fills {id}",
    ):
        assert part in found
    assert found.count("nothing fills") == 1
    assert "names base/here.h" not in found and "'fresh'" not in found


def test_long_lines_and_words_that_documents_must_not_use_are_found():
    long = "x" * 121
    made = "<!-- from code: here.h -->"
    page = f"""{long}
{"ä" * 120}
```
{long} the rig stands still
```
| {long} |
{made}
| {long} twin |
| {long} |

{long}
Requests are refused by
name. `twin`, [it](docs/rig.md), and a timestamp. It Stands still; as a right is.
"""
    lines = [line.split(": ", 1) for line in documents.problems_of("page.md", page)]
    assert [place for place, problem in lines if "columns" in problem] == [f"page.md:{n}" for n in (1, 4, 6, 11)]
    assert [place for place, problem in lines if "write" in problem] == ["page.md:12", "page.md:13"]
    for word, instead in documents.WORDS.items():
        assert documents.problems_of("page.md", f"The {instead}.") == [], f"{word} is written as a word of the list"


def test_text_behind_a_fence_is_found():
    page = "```json\n{}\n```\n```\ncode\n``` Then text.\n```\n``` \n"
    assert documents.problems_of("page.md", page) == ["page.md:6: text after ```: begin a line for it"]


def test_links_to_places_that_a_page_does_not_have_are_found(tmp_path):
    here, there = tmp_path / "here.md", tmp_path / "there.md"
    there.write_text('# One `wake_up(early=True)`, [two](x.md)\n```\n# code\n```\n<a id="old"></a>\n## Three & 4\n')
    good = "[a](there.md#one-wake_upearlytrue-two) [b](there.md#old) [c](there.md#three--4)"
    here.write_text(f"# Here\n{good} [d](https://a.org/there.md#no) [e](#here)\n")
    assert documents.lost_anchors(tmp_path, [here, there]) == []
    here.write_text("# Here\n[a](there.md#code) [b](#there)\n")
    assert documents.lost_anchors(tmp_path, [here, there]) == [
        "here.md: there.md#code is not there", "here.md: #there is not there"
    ]  # fmt: skip


def test_each_bench_that_a_document_names_is_one_that_tools_dev_takes():
    """Options of a bench are --NAME=VALUE: a value behind a blank would be the name of another bench."""
    named = {}
    for page in [path for path in checks.tracked(ROOT) if path.suffix == ".md"]:
        for words in re.findall(r"`[^`\n]*tools/dev bench ([^`\n]+)`", page.read_text()):
            named |= {word: page.name for word in words.split() if not word.startswith(("-", "["))}
    assert len(named) > 10 and named.keys() - commands.BENCHES.keys() == set(), named


def test_every_page_is_checked_and_no_other_file(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "docs/reference").mkdir(parents=True)
    for name in ("README.md", "docs/reference/options.md", "twin.txt"):
        (tmp_path / name).write_text("The twin.\n")
    assert sorted(checks.unclear_documents(tmp_path)) == [
        "README.md:1: 'twin': write reference run", "docs/reference/options.md:1: 'twin': write reference run"
    ]  # fmt: skip


@pytest.mark.skipif(not (checks.LINT / "bin/mypy").exists(), reason="tools/dev setup installs mypy")
def test_a_type_that_does_not_fit_is_found(tmp_path):
    package = tmp_path / "bindings/python/torpor"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (package / "__init__.py").write_text("def size(text: str | None) -> int:\n    return len(text)\n")
    (found,) = checks.wrong_types(tmp_path)
    assert found.startswith("bindings/python/torpor/__init__.py:2: error:")


def test_names_that_the_glossary_replaced_are_found_in_code_and_not_in_words(tmp_path):
    source, script = tmp_path / "a.cpp", tmp_path / "a.py"
    source.write_text('// told by the rig\nint twin = 0;\nlog("told");\nright.tell_all();\n')
    script.write_text('"""As told."""\n\noracle = 1\ntrigger = on_rig\n')
    assert [problem.removeprefix(str(tmp_path)) for problem in replaced_names(tmp_path, [source, script])] == [
        "a.cpp:2: twin: write reference, for a reference run",
        "a.cpp:4: tell_all: write publish, published, response … by what it is",
        "a.py:3: oracle: write expected, for expected output",
        "a.py:4: on_rig: write gpu_path, or scene for objects of a test",
    ]
