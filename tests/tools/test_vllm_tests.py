# SPDX-License-Identifier: Apache-2.0
"""What `tools/dev vllm-tests` makes of the records of its three runs. No test of vLLM runs here."""

import ast
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from devtool import own_sources, setup, vllm_tests
from devtool.outcomes import NOT_RUN, Outcomes, differing, read_list, text_of_list, unlike_list


def run(tmp_path, *lines, cut_off=False) -> Outcomes:
    """Outcomes of a record. A line: test, outcome and perhaps where, or ("test", "method", name)."""
    record = tmp_path / "record"
    objects = [
        {"test": test, "method": more[0]}
        if outcome == "method"
        else {"test": test, "when": more[0] if more else "call", "outcome": outcome, "text": "because"}
        for test, outcome, *more in lines
    ]
    text = "".join(json.dumps(each) + "\n" for each in [*objects, {"finished": 0}])
    record.write_text(text[:-9] if cut_off else text)
    return Outcomes.read(record)


def test_a_test_that_fails_with_torpor_alone_is_named(tmp_path):
    runs = {
        "without": run(tmp_path, ("a", "passed"), ("b[1]", "passed"), ("c", "failed"), ("d", "passed")),
        "unused": run(tmp_path, ("a", "passed"), ("b[1]", "passed"), ("c", "failed"), ("d", "passed")),
        "used": run(tmp_path, ("a", "passed"), ("b[1]", "failed"), ("c", "failed")),
    }
    assert differing(runs, {}) == {
        "b[1]": {"without": "passed", "unused": "passed", "used": "failed"},
        "d": {"without": "passed", "unused": "passed", "used": NOT_RUN},
    }
    assert differing(runs, {"b": "it looks at the scheduler's type"}).keys() == {"d"}


def test_a_test_whose_end_fails_is_an_error_whatever_it_did_before(tmp_path):
    assert run(tmp_path, ("a", "passed"), ("a", "failed", "teardown")).tests == {"a": "error"}
    assert run(tmp_path, ("a", "failed", "setup")).tests == {"a": "error"}
    assert run(tmp_path, ("a", "failed"), ("a", "failed", "teardown")).tests == {"a": "failed"}
    assert run(tmp_path, ("a", "skipped", "setup")).tests == {"a": "skipped"}
    assert run(tmp_path, ("file.py", "failed", "collect")).failed() == {"file.py": "error"}


def test_tests_are_counted_in_which_a_method_of_the_mixin_ran(tmp_path):
    outcomes = run(
        tmp_path,
        *[("a", "method", "__init__"), ("a", "method", "schedule"), ("a", "method", "has_requests"), ("a", "passed")],
        *[("b", "method", "__init__"), ("b", "failed"), ("c", "passed")],
        ("collected", "method", "schedule"),
    )
    assert outcomes.with_mixin() == 1 and outcomes.with_scheduler() == 2
    assert str(outcomes) == "2 passed, 1 failed"


# An engine's process, as vLLM starts it: it calls the plugins, takes a scheduler by name and steps once a line.
ENGINE = """
import importlib.metadata, sys

class SchedulerMixin:
    def schedule(self):
        return "scheduled"

class WorkerMixin:
    def load(self):
        return "loaded"

for point in importlib.metadata.entry_points(group="vllm.general_plugins"):
    if point.name == "torpor_vllm_own":
        point.load()()
from torpor.vllm.named_mixins import NamedMixins
scheduler, worker = (NamedMixins("engine", mixin).over(dict)() for mixin in (SchedulerMixin, WorkerMixin))
for _ in sys.stdin:
    print(scheduler.schedule(), worker.load(), flush=True)
"""


@pytest.mark.parametrize(("run", "noted"), [("used", ["a", "b"]), ("unused", [])])
def test_an_engine_in_its_own_process_is_counted_in_the_test_that_runs(monkeypatch, tmp_path, run, noted):
    """Also one that the test before has started. Between tests nothing is counted."""
    record = tmp_path / "record"
    monkeypatch.setenv("VLLM_OWN_RECORD", str(record))
    monkeypatch.syspath_prepend(vllm_tests.OWN)
    import counting

    vllm_tests.write_entry_point(tmp_path / "plugins")
    of = vllm_tests.Release("0.32.0", tmp_path, {}, tmp_path)
    env = vllm_tests.environment(of, run, record, [vllm_tests.OWN, tmp_path / "plugins"])
    words = [sys.executable, "-c", ENGINE]
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        for test in ("a", "a", "", "b"):
            counting.begin_test(test)
            print(file=engine.stdin, flush=True)
            assert engine.stdout.readline() == "scheduled loaded\n"
        engine.stdin.close()
    assert engine.returncode == 0
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    assert lines == [{"test": test, "method": "schedule"} for test in noted]


def test_the_sum_says_if_the_scheduler_ran_in_fewer_tests_than_are_wanted():
    enough = vllm_tests.sum_of("0.33.0", ["schedulers", "engines"], 500)
    assert enough.endswith("0.33.0's own tests of schedulers, engines: a method of torpor's scheduler ran in 500")
    too_few = vllm_tests.sum_of("0.33.0", ["engines"], 499)
    assert too_few.endswith("ran in 499, fewer than the 500 that are wanted")


def test_no_test_counts_in_two_parts():
    named = [path for part in vllm_tests.PARTS.values() for path in part]
    assert len(set(named)) == len(named)
    of_gpus = set(vllm_tests.GPU_ENGINES)  # in the folder of `engines`, whose modules skip themselves in that part
    for one in set(named) - of_gpus:
        assert not [other for other in set(named) - of_gpus if other.startswith(f"{one}/")]
    assert {Path(path.partition("::")[0]).name for path in of_gpus} <= set(of_gpus_of_the_plugin())
    assert vllm_tests.LEAST_WITH_MIXIN.keys() == vllm_tests.PARTS.keys()


def of_gpus_of_the_plugin() -> tuple[str, ...]:
    [found] = [
        ast.literal_eval(line.value)
        for line in ast.parse((vllm_tests.OWN / "plugin.py").read_text()).body
        if isinstance(line, ast.Assign) and line.targets[0].id == "OF_GPUS"
    ]
    return found


def test_where_no_part_is_named_those_run_that_have_a_list(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_tests, "LISTS", tmp_path)
    for name in ("0.32.0-engines.txt", "0.32.0-connectors.txt", "0.33.0-schedulers.txt"):
        (tmp_path / name).touch()
    assert vllm_tests.with_list("0.32.0") == ["engines", "connectors"]
    assert vllm_tests.with_list("0.33.0") == ["schedulers"]


def test_the_three_runs_of_a_part_have_one_environment():
    assert vllm_tests.environment_of("schedulers") == vllm_tests.environment_of("connectors") == {}
    of_part = vllm_tests.environment_of("gpu_engines")
    assert of_part.keys() == {"VLLM_OWN_GPU_ENGINES", "VLLM_OWN_FORKED", "TORCH_COMPILE_DISABLE", "OMP_NUM_THREADS"}
    assert (Path(of_part["VLLM_OWN_FORKED"]) / "zygote.py").exists()


def test_a_run_that_was_cut_off_has_not_finished(tmp_path):
    whole, cut = run(tmp_path, ("a", "passed")), run(tmp_path, ("a", "passed"), cut_off=True)
    assert whole.finished and not cut.finished
    assert cut.tests == {"a": "passed"}
    assert Outcomes.read(tmp_path / "none") == Outcomes()


def test_a_second_run_of_some_tests_takes_the_place_of_their_first(tmp_path):
    first = run(tmp_path, ("a", "passed"), ("b", "failed"), ("a", "method", "schedule"))
    again = run(tmp_path, ("b", "passed"), ("b", "method", "schedule"))
    both = first.replaced_by(again)
    assert both.tests == {"a": "passed", "b": "passed"} and both.with_mixin() == 2 and both.finished


def test_the_list_of_what_fails_without_torpor_is_held_against_the_run(tmp_path):
    outcomes = run(tmp_path, ("a", "passed"), ("b", "failed"), ("c", "failed"))
    path = tmp_path / "list.txt"
    assert read_list(path) == {}
    path.write_text(text_of_list("0.32.0", outcomes))
    assert read_list(path) == {"b": "because", "c": "because"}
    assert unlike_list(outcomes, read_list(path)) == []
    changed = run(tmp_path, ("a", "failed"), ("b", "passed"), ("c", "failed"))
    assert unlike_list(changed, read_list(path)) == [
        "fails without torpor, which the list does not say: a",
        "is in the list of those that fail without torpor, and is passed: b",
    ]


def test_torpor_is_found_only_where_it_is_to_be_installed(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("TORPOR_CHECKPOINT_DIR", "/checkpoints")
    of = vllm_tests.Release("0.32.0", tmp_path, {"HF_HUB_OFFLINE": "1"}, tmp_path)
    found = {name: vllm_tests.environment(of, name, tmp_path / "record", [tmp_path]) for name in vllm_tests.RUNS}
    paths = {name: env["PYTHONPATH"].split(":") for name, env in found.items()}
    assert paths == {
        "without": [str(tmp_path)],
        "unused": [str(tmp_path), str(setup.SITE)],
        "used": [str(tmp_path), str(setup.SITE)],
    }
    asked = {name: {each for each in env if each.startswith("TORPOR_")} for name, env in found.items()}
    assert asked == {"without": set(), "unused": set(), "used": {"TORPOR_ENABLED"}}


def test_of_an_archive_only_the_tests_are_unpacked(tmp_path):
    def packed(*names):
        for name in names:
            (tmp_path / "vllm-1" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "vllm-1" / name).write_text(name)
        with tarfile.open(tmp_path / "vllm-1.tar.gz", "w:gz") as archive:
            for name in names:
                archive.add(tmp_path / "vllm-1" / name, f"vllm-1/{name}")
        return tmp_path / "vllm-1.tar.gz"

    archive = packed("pyproject.toml", "vllm/engine.py", "tests/v1/core/utils.py", "rust/tests/v1/own.rs", "setup.py")
    own_sources.unpack(archive, tmp_path / "out")
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == {"pyproject.toml", "tests/v1/core/utils.py"}
    with pytest.raises(setup.SetupError, match="has no tests"):
        own_sources.unpack(packed("pyproject.toml", "vllm/engine.py"), tmp_path / "none")


def test_a_release_that_torpor_does_not_know_is_refused():
    with pytest.raises(setup.SetupError, match=r"not '0.12'"):
        vllm_tests.main(["0.32", "0.12"])
