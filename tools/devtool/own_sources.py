# SPDX-License-Identifier: Apache-2.0
"""Sources of a release of vLLM with its tests, which no wheel has."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from devtool import contract, setup
from devtool.setup import CACHE, SetupError

# pip asks the build system of what it downloads for its metadata; vLLM's needs torch for the answer, and a compiler.
# This one has the answer that lies in the archive. None of the archive's code runs.
_BUILD_SYSTEM = """
import os, shutil

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    os.mkdir(os.path.join(directory, "vllm.dist-info"))
    shutil.copy("PKG-INFO", os.path.join(directory, "vllm.dist-info", "METADATA"))
    return "vllm.dist-info"
"""


def tests_of(version: str) -> Path:
    """The folder that holds `tests` of this release, and pyproject.toml, which has pytest's settings."""
    kept = CACHE / f"sources/vllm-tests-{version}"
    if (kept / "complete").exists():
        return kept
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        archive = download(version, Path(folder))
        shutil.rmtree(kept, ignore_errors=True)
        unpack(archive, kept)
    (kept / "complete").touch()
    return kept


def download(version: str, folder: Path) -> Path:
    """pip looks at the digest of what it downloads."""
    build_system = folder / "build-system/setuptools"
    build_system.mkdir(parents=True)
    (build_system / "__init__.py").touch()
    (build_system / "build_meta.py").write_text(_BUILD_SYSTEM)
    pip = [contract.pip_alone(), "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    words = [*pip, "--no-binary=vllm", "--no-build-isolation", "-d", folder, f"vllm=={version}"]
    title, env = f"Sources of vLLM {version} (45 MB)", os.environ | {"PYTHONPATH": str(build_system.parent)}
    setup.run(title, words, env=env, log_name="vllm-sources")
    return next(folder.glob("vllm-*.tar.gz"))


def unpack(archive: Path, folder: Path) -> None:
    """Of `archive` what vLLM's tests are, and no more."""
    with tarfile.open(archive) as packed:
        members = []
        for member in packed.getmembers():
            member.name = member.name.partition("/")[2]
            if member.name == "pyproject.toml" or member.name.startswith("tests/"):
                members.append(member)
        if not any(member.name.startswith("tests/v1/") for member in members):
            raise SetupError(f"{archive.name} has no tests of vLLM's")
        packed.extractall(folder, members, filter="data")
