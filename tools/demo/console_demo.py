# SPDX-License-Identifier: Apache-2.0
"""`tools/dev demo --console`: the same session, with its blocks offloaded. The events that both processes leave are
recorded, and the console draws pictures of them. docs/console.md shows these."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from engine_child import DemoError

ROOT = Path(__file__).resolve().parents[2]
BINARY = os.environ.get("TORPOR_BINARY") or ROOT / "build/release/tools/torpor/torpor"
TEXTUAL = ROOT / "build/console"
# KV that was computed in another batch differs in its last digits: in float32 that rounds no token otherwise.
ENGINE = {"dtype": "float32", "max_model_len": 1024, "num_gpu_blocks_override": 48}
OFFLOAD = {"offload": "eager", "host_bytes": "128MiB", "disk_bytes": "64MiB"}


class RecordedEvents:
    """The events of the demo's engines, from their rings to pictures."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._rings = Path(tempfile.mkdtemp(prefix="torpor-demo-", dir="/dev/shm"))
        self.environment = {"TORPOR_EVENTS_DIR": str(self._rings)}
        torpor = {"checkpoint_dir": str(directory)} | OFFLOAD
        self.arguments = ["--options", json.dumps(ENGINE | {"additional_config": {"torpor": torpor}})]

    def close(self) -> None:
        shutil.rmtree(self._rings, ignore_errors=True)

    def keep(self) -> dict:
        """Both processes were killed: what they published is in their rings. A recording of it, pictures and a page."""
        recording, pictures = self.directory / "recording", self.directory / "pictures"
        recorded = json.loads(ask("record", self._rings, "-o", recording, "--json"))
        page = self.directory / "console.html"
        page.write_text(ask("events", recording, "--export", "html"))
        drawn = subprocess.run(
            [sys.executable, "-m", "torpor.console", "--replay", recording, "--svg", pictures],
            env=os.environ | {"TORPOR_BINARY": str(BINARY), "PYTHONPATH": os.pathsep.join([*sys.path, str(TEXTUAL)])},
            capture_output=True,
            text=True,
        )
        if drawn.returncode != 0:
            raise DemoError(f"the console drew nothing:\n{drawn.stderr[-2000:]}")
        return {
            "directory": str(self.directory),
            "recording": str(recording),
            "events": recorded["events"],
            "lost_events": recorded["lost"],
            "pictures": sorted(str(path) for path in pictures.glob("*.svg")),
            "page": str(page),
        }


def ask(*words) -> str:
    done = subprocess.run([BINARY, *map(str, words)], capture_output=True, text=True)
    if done.returncode != 0:
        raise DemoError(f"torpor {words[0]}: {done.stderr.strip()}")
    return done.stdout


def rows(result: dict) -> list[tuple[str, str]]:
    return [
        ("events", f"{result['events']}, {result['lost_events']} lost, of a killed process and the one after it"),
        ("recording", result["recording"]),
        ("look inside", f"tools/dev torpor console {result['recording']} --once"),
        ("pictures", f"{result['directory']}/pictures: {', '.join(Path(p).stem for p in result['pictures'])}"),
        ("page", result["page"]),
    ]
