# SPDX-License-Identifier: Apache-2.0
"""The Helm chart of deploy/helm, rendered. As a program: prints the Kustomize base."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import jsonschema
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/torpor"
RENDER = Path(__file__).with_name("render.go")


def digest() -> str:
    """Of all that the base is made from."""
    made_from = sorted(path for path in CHART.rglob("*") if path.is_file())
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in made_from)).hexdigest()


def values(changes: dict | None = None, of_chart: dict[str, str] | None = None) -> dict:
    """The chart's values with changes, by their dotted names; what the schema refuses is a ValidationError.

    `of_chart`: of the values only these, as an older chart had them: the names of each table, "": all of it."""
    content = yaml.safe_load((CHART / "values.yaml").read_text())
    if of_chart is not None:
        content = {
            table: {name: content[table][name] for name in names.split()} if names else content[table]
            for table, names in of_chart.items()
        }
    for name, value in (changes or {}).items():
        *parents, last = name.split(".")
        place = content
        for parent in parents:
            place = place[parent]
        place[last] = value
    jsonschema.validate(content, json.loads((CHART / "values.schema.json").read_text()))
    return content


def render(changes: dict | None = None, service: str = "Helm", of_chart: dict[str, str] | None = None) -> str:
    """Needs Go and sprig. RuntimeError: the chart refuses these values."""
    return _rendered(values(changes, of_chart), service).stdout


def notes(changes: dict | None = None) -> str:
    """What `helm install` prints."""
    return _rendered(values(changes), "Helm").stderr


def _rendered(given: dict, service: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "CGO_ENABLED": "0"}
    words = ["go", "run", RENDER, CHART, "llm", "default", service]
    done = subprocess.run(words, input=json.dumps(given), capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return done


def manifests(text: str) -> dict[tuple[str, str], dict]:
    """By kind and name."""
    documents = [each for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def main() -> None:
    print(f"# The chart of deploy/helm with its own values, made by tools/dev deploy. Chart: {digest()}")
    print(render(service="Kustomize"), end="")


if __name__ == "__main__":
    main()
