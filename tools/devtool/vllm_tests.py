# SPDX-License-Identifier: Apache-2.0
"""tools/dev vllm-tests: vLLM's own tests without torpor, with torpor installed and unused, and with torpor used.

A test whose outcome is not the same in all three is a fault of torpor's, unless tests/vllm_own/explained.txt has its
reason. What fails on a CPU without torpor stands in tests/golden/vllm-own, a file for each release.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from devtool import other_vllm, own_sources, setup
from devtool.outcomes import NOT_RUN, Outcomes, differing, read_list, text_of_list, unlike_list
from devtool.setup import CACHE, ROOT, SetupError

OWN = ROOT / "tests/vllm_own"
EXPLAINED = OWN / "explained.txt"
LISTS = ROOT / "tests/golden/vllm-own"
# Of vLLM's tests, in two parts; a release has not all of them.
SCHEDULERS = (
    "tests/v1/core",
    "tests/v1/streaming_input",
    "tests/v1/spec_decode/test_dynamic_sd.py",
    "tests/v1/spec_decode/test_dflash_lookahead.py",
    "tests/v1/ec_connector/unit/test_ec_transfer_params.py",
    "tests/v1/simple_kv_offload/test_scheduler.py",
    *(
        f"tests/v1/kv_connector/unit/{name}"
        for name in (
            "offloading_connector",
            "test_bidirectional_kv_transfer.py",
            "test_cache_pollution_prevention.py",
            "test_decode_bench_connector.py",
            "test_error_propagation.py",
            "test_invalid_blocks_correctness.py",
            "test_kv_load_failure_recovery.py",
            "test_remote_decode_lifecycle.py",
            "test_remote_prefill_lifecycle.py",
            "test_scheduler_kv_connector_override.py",
        )
    ),
)
# Engines, and the sleep mode.
ENGINES = (
    "tests/v1/engine",
    "tests/v1/worker/test_sleep_mode_backend.py",
    "tests/basic_correctness/memory",
    "tests/model_executor/test_sleep_mode_tensor_ownership.py",
    "tests/entrypoints/serve/dev/test_sleep.py",
    "tests/entrypoints/rl/state_transitions/test_sleep.py",
)
# Modules of tests that skip themselves where there is no GPU. On a CPU most of their tests pass, if the plugin has them
# run. (test_async_llm.py asks the network for a picture when it is imported.)
GPU_ENGINES = (
    "tests/v1/engine/test_abort_final_step.py",
    "tests/v1/engine/test_engine_core.py",
    "tests/v1/engine/test_engine_core_client.py",
)
# Modules whose tests are short beside the start of an engine; one of them skips itself, too.
SHARED_ENGINES = (
    "tests/v1/sample/test_sampling_params_e2e.py",
    *(
        f"tests/v1/sample/test_logprobs.py::{name}"  # its others start an engine each
        for name in ("test_get_logprobs_and_prompt_logprobs", "test_none_logprobs", "test_zero_logprobs")
    ),
    "tests/v1/e2e/general/test_min_tokens.py",
    "tests/v1/e2e/general/test_streaming_input.py",
    "tests/plugins_tests/test_scheduler_plugins.py",
    "tests/entrypoints/pooling/embed/test_offline.py",
    "tests/entrypoints/pooling/token_embed/test_offline.py",
    "tests/entrypoints/pooling/basic/test_encode.py",
    "tests/entrypoints/pooling/classify/test_offline.py",
    "tests/entrypoints/pooling/token_classify/test_offline.py",
    "tests/entrypoints/pooling/basic/test_tiling_engine.py",
    "tests/entrypoints/pooling/scoring/test_cross_encoder_offline.py",
    "tests/entrypoints/llm/test_chat.py",
    "tests/entrypoints/llm/test_generate.py",
    "tests/entrypoints/llm/test_prompt_validation.py",
    "tests/detokenizer/test_disable_detokenization.py",
    "tests/detokenizer/test_stop_reason.py",
    "tests/samplers/test_ignore_eos.py",
    "tests/samplers/test_logprobs.py",
    "tests/samplers/test_no_bad_words.py",
    "tests/v1/e2e/general/test_context_length.py",
    "tests/v1/logits_processors/test_custom_offline.py",
)
# KV connectors that move between machines, with schedulers of vLLM.
CONNECTORS = (
    "tests/v1/kv_connector/unit/test_multi_connector.py",
    "tests/v1/kv_connector/unit/test_nixl_connector.py",
    "tests/v1/kv_connector/unit/test_nixl_simple_cpu_offload.py",
)
PARTS = {
    "schedulers": SCHEDULERS,
    "engines": ENGINES,
    "gpu_engines": GPU_ENGINES,
    "shared_engines": SHARED_ENGINES,
    "connectors": CONNECTORS,
}
# Parts whose engines are forked from one process that has imported vLLM, and compile nothing.
FORKED = ("gpu_engines", "shared_engines")
# What hangs on a CPU, or takes many minutes there.
LEFT_OUT = (
    "tests/v1/engine/test_dp_world_group_port.py",
    "tests/v1/engine/test_llm_engine.py::test_parallel_sampling",
    "tests/v1/core/test_reset_prefix_cache_e2e.py",
    "tests/v1/core/test_kv_cache_utils.py::test_is_kv_cache_spec_uniform",
)
RUNS = ("without", "unused", "used")
RUN_SECONDS = 14400
# Of a release.
LEAST_WITH_MIXIN = {"schedulers": 380, "engines": 0, "gpu_engines": 12, "shared_engines": 100, "connectors": 12}
WANTED_WITH_MIXIN = 500  # of a release, all its parts together. Fewer are said, and do not fail.
USAGE = (
    f"tools/dev vllm-tests takes releases of vLLM that torpor knows, as 0.32; some of {', '.join(PARTS)}, or files of "
    "its tests/; and --golden"
)
# An operator that this torchvision has for another build of torch: it must have its name there to be imported.
_OPERATORS = """
if not _has_ops():
    _operators = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _operators.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


@dataclass(frozen=True)
class Release:
    """A release of vLLM, with what its tests need."""

    version: str
    python: Path
    env: dict[str, str]
    tests: Path  # the folder that holds `tests`


def main(arguments: list[str]) -> int:
    words = [word for word in arguments if word not in ("--golden", *PARTS) and not word.startswith("tests/")]
    named = [word for word in arguments if word in PARTS]
    paths = [word for word in arguments if word.startswith("tests/")]
    if paths and "--golden" in arguments:
        raise SetupError(f"{USAGE}: a list is of all tests")
    known = {other_vllm.ALL_TESTS, *other_vllm.ENVIRONMENTS}
    versions = [".".join(word.split(".")[:2]) for word in words] or sorted(known)
    if wrong := [word for word, version in zip(words, versions, strict=False) if version not in known]:
        raise SetupError(f"{USAGE}, not {wrong[0]!r}")
    python, model = setup.prerequisites()
    setup.install_torpor(python)
    shared = {"HF_HOME": str(hub(python, model)), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    found = [OWN, packages(python)]
    code = 0
    for version in versions:
        of = release(version, python, shared)
        if paths:
            code |= judged(of, found, paths, None, False)[0]
            continue
        with_mixin, parts = 0, named or with_list(of.version)
        for part in parts:
            of_part = replace(of, env=of.env | environment_of(part))
            problems, count = judged(of_part, found, list(PARTS[part]), part, "--golden" in arguments)
            code, with_mixin = code | problems, with_mixin + count
        if not named:
            print(sum_of(of.version, parts, with_mixin), flush=True)
    return code


def with_list(version: str) -> list[str]:
    """Return the parts that run where none is named: those with a list of what fails without torpor."""
    return [part for part in PARTS if (LISTS / f"{version}-{part}.txt").exists()]


def environment_of(part: str) -> dict[str, str]:
    """Return what the runs of a part have in their environment besides. It is the same in all three."""
    if part not in FORKED:
        return {}
    return {
        "VLLM_OWN_GPU_ENGINES": "1",
        "VLLM_OWN_FORKED": str(ROOT / "tests/python"),
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }


def sum_of(version: str, parts: list[str], with_mixin: int) -> str:
    """Say in how many tests of these parts a method of torpor's scheduler ran."""
    wanted = "" if with_mixin >= WANTED_WITH_MIXIN else f", fewer than the {WANTED_WITH_MIXIN} that are wanted"
    return (
        f"proof: vLLM {version}'s own tests of {', '.join(parts)}: a method of torpor's scheduler ran in "
        f"{with_mixin}{wanted}"
    )


def release(version: str, python: Path, shared: dict[str, str]) -> Release:
    full = {other_vllm.ALL_TESTS: setup.VLLM_WHEEL.rpartition("=")[2], "0.31": other_vllm.OLDER}
    python, more = (python, {}) if version == other_vllm.ALL_TESTS else other_vllm.environment(version)
    full_version = full.get(version, other_vllm.NEWER)
    return Release(full_version, python, shared | more, own_sources.tests_of(full_version))


def hub(python: Path, model: Path) -> Path:
    """The models that vLLM's tests name, tiny and random."""
    maker = OWN / "hub.py"
    folder = CACHE / f"models/hub-{hashlib.sha256(maker.read_bytes()).hexdigest()[:12]}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        setup.run("Models of vLLM's tests", [python, maker, folder, model], log_name="vllm-tests-hub")
        (folder / "complete").touch()
    return folder


def packages(python: Path) -> Path:
    """What vLLM's tests import beside vLLM."""
    wanted = setup.read_list("vllm-tests.txt")
    folder = CACHE / f"vllm-tests-{hashlib.sha256(' '.join([*wanted, _OPERATORS]).encode()).hexdigest()[:12]}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--target", folder]
        setup.run("What vLLM's tests import", [*pip, *wanted], log_name="vllm-tests-packages")
        with open(folder / "torchvision/extension.py", "a") as file:
            file.write(_OPERATORS)
        (folder / "complete").touch()
    return folder


def judged(of: Release, paths: list[Path], wanted: list[str], part: str | None, golden: bool) -> tuple[int, int]:
    """Run tests three times, and once more those that differ.

    wanted: files, folders or tests. part: of PARTS, if they are all of one part, which has a list and a least count.
    Return 1 if something is not as it should be, else 0, and in how many tests a method of torpor's scheduler ran.
    """
    began = time.monotonic()
    chosen = [path for path in wanted if (of.tests / path.partition("::")[0]).exists()]
    seconds, runs = {}, {}
    for run in RUNS:
        before = time.monotonic()
        runs[run] = one_run(of, run, chosen, paths)
        seconds[run] = time.monotonic() - before
        print(f"vLLM {of.version}, {run}: {len(runs[run].tests)} tests, {runs[run]}, {seconds[run]:.0f} s", flush=True)
    explained, path = read_list(EXPLAINED), LISTS / f"{of.version}-{part}.txt"
    once = set(differing(runs, explained))
    if part and path.exists() and not golden:
        once |= runs["without"].failed().keys() ^ read_list(path).keys()
    if once:  # because of torpor, or because others keep the machine busy
        again = {run: one_run(of, run, sorted(once), paths) for run in RUNS}
        for test in sorted(once):
            if any(runs[run].tests.get(test) != again[run].tests.get(test) for run in RUNS):
                print(f"vLLM {of.version}: does not always end in the same way: {test}")
        runs = {run: runs[run].replaced_by(again[run]) for run in RUNS}
    differ = differing(runs, explained)
    problems = [
        f"{test}: {', '.join(f'{run} {outcome}' for run, outcome in of_runs.items())}{reason(runs['used'], test)}"
        for test, of_runs in differ.items()
    ]
    problems += [f"the run {run!r} did not come to its end" for run in RUNS if not runs[run].finished]
    if part and golden and not problems:
        LISTS.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of_list(of.version, runs["without"]))
    used = runs["used"]
    if part and path.exists():
        problems += unlike_list(runs["without"], read_list(path))
    elif part:
        words = f"tools/dev vllm-tests {of.version} {part} --golden"
        problems.append(f"there is no list of what fails without torpor: {words} writes it")
    if part and used.with_mixin() < LEAST_WITH_MIXIN[part]:
        problems.append(f"the mixin ran in {used.with_mixin()} tests only; wanted are {LEAST_WITH_MIXIN[part]}")
    for problem in problems:
        print(f"vLLM {of.version}: {problem}")
    named = f" of {part}" if part else ""
    print(
        f"proof: vLLM {of.version}'s own tests{named}: {len(used.tests)}; without torpor {runs['without']}; installed "
        f"and unused {runs['unused']}; used {used}; {len(differ)} differ; a method of torpor's scheduler ran in "
        f"{used.with_mixin()} ({used.with_scheduler()} made one); {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return int(bool(problems)), used.with_mixin()


def reason(used: Outcomes, test: str) -> str:
    return f" ({used.why[test]})" if used.tests.get(test, NOT_RUN) not in ("passed", NOT_RUN) else ""


def one_run(of: Release, run: str, chosen: list[str], paths: list[Path]) -> Outcomes:
    """In a copy of the tests, where no run finds what another one has left."""
    with tempfile.TemporaryDirectory(prefix="torpor-vllm-tests-") as folder:
        copy, record = Path(folder) / "vllm", Path(folder) / "record"
        write_entry_point(Path(folder) / "plugins")
        shutil.copytree(of.tests, copy)
        words = [of.python, "-m", "pytest", "-q", "--tb=no", "--no-summary", "-p", "no:cacheprovider", "-p", "plugin"]
        words += ["-W", "ignore", "--continue-on-collection-errors", *chosen]
        words += [f"--deselect={path}" for path in LEFT_OUT]
        log = CACHE / f"logs/vllm-tests-{of.version}-{run}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w") as out:
            process = subprocess.Popen(
                list(map(str, words)),
                cwd=copy,
                env=environment(of, run, record, [*paths, Path(folder) / "plugins"]),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(RUN_SECONDS)
            except subprocess.TimeoutExpired:
                setup.say(f"the run {run!r} took more than {RUN_SECONDS} seconds and is ended; see {log}")
            finally:
                end_all(process)
        return Outcomes.read(record)


def write_entry_point(folder: Path) -> None:
    """Have vLLM call tests/vllm_own/counting.py in each process that has `folder` in its PYTHONPATH."""
    about = folder / "torpor_vllm_own-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torpor-vllm-own\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\ntorpor_vllm_own = counting:count\n")


def end_all(process: subprocess.Popen) -> None:
    """The tests' processes, too, which some of vLLM's leave behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment(of: Release, run: str, record: Path, paths: list[Path]) -> dict[str, str]:
    """Of one run. torpor is found only where it is to be installed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORPOR_")}
    found = [*paths, *([] if run == "without" else [setup.SITE])]
    env |= of.env | {"PYTHONPATH": os.pathsep.join(map(str, found)), "TORPOR_ENABLED": "1"}
    if run != "used":
        del env["TORPOR_ENABLED"]
    return env | {"VLLM_OWN_RUN": run, "VLLM_OWN_RECORD": str(record)}
