# SPDX-License-Identifier: Apache-2.0
"""What users install, made as they get it, put where nothing of this checkout is, and used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT
from s3_server import BUCKET, S3Server
from devtool import other_vllm, packages, setup
from zygote import ENVIRONMENT

# Of the C library and of the compiler's runtime, which every Linux has; nothing of Debian, torch or CUDA.
MAY_NEED = {"libc.so.6", "libpthread.so.0", "libdl.so.2", "libm.so.6", "ld-linux-x86-64.so.2", "libgcc_s.so.1"}
USE = """
import ctypes, torpor, torpor.torch_memory_saver
from torpor import _core, errors, memory
assert torpor.__file__.startswith({folder!r}), torpor.__file__
with memory.scope("weights"):
    address = memory.allocate(64 << 20)
ctypes.memset(address, 7, 64 << 20)
memory.sleep("weights")
memory.wake("weights")
assert ctypes.string_at(address, 64 << 20) == bytes([7]) * (64 << 20)
try:
    torpor.read_checkpoint("/nowhere")
except errors.NotFound as problem:  # C++ exceptions and errors work
    print(problem)
"""


def made_all(words: list, names: str) -> list[Path]:
    command = [sys.executable, ROOT / "tools/dev", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return list((ROOT / "dist").glob(names))


def made(word: str, name: str) -> Path:
    [path] = made_all([word], name)
    return path


def other_pythons() -> list[Path]:
    """Those of this machine, besides the one of the environment, for which a wheel can be made: one a version."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    found = {}
    for minor in range(11, 15):
        named = f"python3.{minor}"
        kept = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{named}"))
        for python in [*kept, *map(Path, filter(None, [shutil.which(named)]))]:
            asked = "import os, sysconfig; print(os.path.exists(sysconfig.get_path('include') + '/Python.h'))"
            has_headers = subprocess.run([python, "-c", asked], capture_output=True, text=True).stdout == "True\n"
            if has_headers and f"3.{minor}" != version:
                found.setdefault(minor, python)
    return list(found.values())


@pytest.fixture(scope="module")
def wheels() -> list[Path]:
    others = [word for python in other_pythons() for word in ("--python", python)]
    return made_all(["wheel", *others], "torpor-*.whl")


@pytest.fixture(scope="module")
def wheel(wheels):
    [own] = [path for path in wheels if f"-cp{sys.version_info[0]}{sys.version_info[1]}-" in path.name]
    return own


@pytest.mark.long  # the library is compiled once more for it
def test_it_needs_nothing_that_a_linux_of_2018_lacks(wheel, tmp_path):
    assert wheel.name.endswith("-manylinux_2_28_x86_64.whl")  # auditwheel has looked at the symbols' versions
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (module,) = [name for name in names if name.endswith(".so")]
        archive.extract(module, tmp_path)
    assert {"torpor/py.typed", "torpor/vllm/plugin.py"} < set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    dynamic = output("readelf", "-dW", tmp_path / module)
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert needed and needed <= MAY_NEED
    exported = {line.split()[2] for line in output("nm", "-D", "--defined-only", tmp_path / module).splitlines()}
    assert "PyInit__core" in exported
    assert all(name.startswith(("PyInit__core", "torpor_", "tms_", "set_memory_margin_bytes")) for name in exported)


@pytest.mark.long
def test_other_pythons_have_wheels_of_their_own(wheels, tmp_path):
    others = other_pythons()
    if not others:
        pytest.skip("there is no other Python 3.11 to 3.14 with its headers on this machine")
    for number, python in enumerate(others):
        site = tmp_path / str(number)
        tag = output(python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])").strip()
        [own] = [path for path in wheels if f"-{tag}-" in path.name]
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--target", site, own]
        subprocess.run(pip, check=True, timeout=600)
        environment = os.environ | {"PYTHONPATH": str(site), "TORPOR_MEMORY_DEVICE": "host"}
        assert "/nowhere" in output(python, "-c", USE.format(folder=str(site)), env=environment)


def test_a_python_that_cannot_build_a_wheel_is_refused_before_anything_is_built(tmp_path):
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho 3.10 /usr/include/python3.10\n")
    bare = tmp_path / "bare"
    bare.write_text("#!/bin/sh\necho 3.13 /nowhere\n")
    for each in (old, bare):
        each.chmod(0o755)
    for python, words in (
        (old, "needs 3.11 or newer"), (bare, "python3.13-dev"), (tmp_path / "none", "does not run as Python"),
    ):  # fmt: skip
        with pytest.raises(setup.SetupError, match=words):
            packages._builder(python)


@pytest.mark.long
def test_it_works_where_nothing_of_the_checkout_is(wheel, tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--target", tmp_path / "site", wheel], check=True, timeout=600)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "TORPOR_MEMORY_DEVICE": "host"}
    code = USE.format(folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "/nowhere" in done.stdout
    inspector = tmp_path / "site/bin/torpor"
    golden = shutil.copytree(ROOT / "tests/golden/v4-unsealed/g-000001", tmp_path / "g-000001")
    assert json.loads(output(inspector, "verify", "--json", golden))["whole"] is True


REMOTE = """
import torpor, torpor.errors
from torpor import _core
assert torpor.__file__.startswith({folder!r}), torpor.__file__
try:
    print(_core.RemoteHome({url!r}, 30.0).take())
except torpor.errors.Error as problem:
    print(problem)
"""


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The Python of an environment that has the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("bare") / "environment"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", wheel]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # a torpor is there already
    subprocess.run(pip, check=True, timeout=600, env=bare)
    return folder / "bin/python"


@pytest.mark.long
def test_the_wheel_reaches_object_stores_by_the_libcurl_of_the_machine(installed, tmp_path):
    bare = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    inspector = installed.parent / "torpor"
    golden = shutil.copytree(ROOT / "tests/golden/v4-unsealed/g-000001", tmp_path / "g-000001")

    def torpor(*words, code: int = 0, **environment) -> dict:
        done = subprocess.run(
            [inspector, *map(str, words), "--json"], env=bare | environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    (tmp_path / "s3").mkdir()
    with S3Server(tmp_path / "s3", tls=True) as server:
        for environment in (server.environment, server.encrypted):
            url = f"s3://{BUCKET}/{'tls' if environment is server.encrypted else 'plain'}"
            pushed = torpor("push", golden, url, **environment)
            [listed] = torpor("ls", url, **environment)["checkpoints"]
            assert listed["name"] == pushed["name"] and listed["metadata"] == {}
            pulled = torpor("pull", url, tmp_path / "to", **environment)
            assert torpor("verify", pulled["path"])["whole"] is True
        # In the module, too. A library that cannot be loaded stands in for one that is not there.
        for name in ("libcurl.so.4", "libcurl-gnutls.so.4", "libssl.so.3"):
            (tmp_path / name).touch()
        without = server.environment | {"LD_LIBRARY_PATH": str(tmp_path)}
        error = torpor("ls", f"s3://{BUCKET}/plain", code=4, **without)["error"]
        assert "libcurl.so.4 cannot be loaded" in error["what"] and "libcurl4" in error["next_step"]
        code = REMOTE.format(folder=str(installed.parents[1]), url=f"s3://{BUCKET}/owned")
        said = [output(installed, "-c", code, env=bare | each) for each in (server.environment, without)]
        assert said[0] == "True\n" and "libcurl.so.4 cannot be loaded" in said[1]


@pytest.mark.long
def test_engines_with_the_wheel_share_kv_over_tls_by_the_openssl_of_the_machine(wheel, tmp_path):
    """The test of that, with the wheel in place of the torpor that this checkout has built."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--target", tmp_path / "site", wheel], check=True, timeout=600)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}"}
    module = output(sys.executable, "-c", "from torpor import _core; print(_core.__file__)", env=environment)
    assert module.startswith(str(tmp_path))
    words = ["-m", "pytest", "-p", "no:cacheprovider", "-q", ROOT / "tests/python/test_connector_remote.py"]
    words += ["-k", "what_one_engine_computed"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.long
def test_the_lines_of_the_readme_run_where_the_wheel_lies_beside_vllm(wheel, real_model, tmp_path):
    base = setup.python_environment()
    other_vllm.begin(tmp_path / "environment", next(base.parents[1].glob("lib/python*/site-packages")))
    python = tmp_path / "environment/bin/python"
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENVIRONMENT
    pip = [base, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "-q", "--no-deps", wheel]
    subprocess.run(pip, check=True, env=bare)
    assert output(python, "-c", "import torpor; print(torpor.__file__)", env=bare).startswith(str(tmp_path))
    text = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    script = tmp_path / "tale.py"
    script.write_text(text.replace("/tmp/torpor", str(tmp_path / "torpor")))

    def run(word: str) -> list[str]:
        command = [python, script, real_model, word]
        done = subprocess.run(command, env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return [line for line in done.stdout.splitlines() if not line.startswith("(") and " INFO " not in line]

    *_, begun, checkpoint = run("sleep")
    assert begun[0] in "\"'" and Path(checkpoint).is_dir()
    ended = run("wake")[-1]
    assert ended[1:].startswith(begun[1:-1]) and len(ended) > len(begun) + 20
    assert output(python, "-m", "torpor.vllm.serve", "--help", env=bare).startswith("usage: python -m torpor")
    printed = output(python, "-m", "torpor.vllm.serve", "--torpor-help", env=bare)
    assert "--torpor-object-store" in printed and "--torpor-checkpoint-dir" in printed
    assert output(python.with_name("torpor"), "info", checkpoint, env=bare).startswith(checkpoint)


@pytest.mark.long
def test_the_sources_build_where_nothing_of_the_checkout_is(wheel, tmp_path):
    (sources,) = (ROOT / "dist").glob("torpor-*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q"]
    build = [*pip, "--no-deps", "--no-build-isolation", "-w", tmp_path, sources]
    subprocess.run(build, check=True, timeout=900, cwd=tmp_path)
    built, portable = python_of(next(tmp_path.glob("torpor-*.whl"))), python_of(wheel)
    assert built == portable and "torpor/verl/server.py" in built


def python_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.endswith((".py", ".pyi", "py.typed"))}


def test_the_inspector_is_a_package_of_its_own(tmp_path, shown):
    package = made("deb", "torpor-tools_*.deb")
    fields = output("dpkg-deb", "--field", package)
    assert "Package: torpor-tools" in fields and "libzstd1" in fields and "python" not in fields
    subprocess.run(["dpkg-deb", "--extract", package, tmp_path], check=True)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"usr/bin/torpor"}
    assert json.loads(output(tmp_path / "usr/bin/torpor", "verify", "--json", shown["checkpoint"]))["whole"] is True


def test_a_program_builds_against_the_installed_library(tmp_path):
    build = ["cmake", "--install", ROOT / "build/release", "--component", "development", "--prefix"]
    subprocess.run([*build, tmp_path / "prefix"], check=True, stdout=subprocess.DEVNULL)
    words = ["cmake", "-G", "Ninja", "-S", ROOT / "tests/install", "-B", tmp_path / "build"]
    output(*words, f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}")
    output("cmake", "--build", tmp_path / "build")
    assert output(tmp_path / "build/example") == "slept and woke, 7\n"


def output(*command, env=None) -> str:
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True, env=env).stdout
