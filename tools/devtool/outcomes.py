# SPDX-License-Identifier: Apache-2.0
"""Outcomes of vLLM's own tests in their three runs, compared test by test. tests/vllm_own/plugin.py records them."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

NOT_RUN = "not run"
FAILED = ("failed", "error")
SHOWN = ("passed", *FAILED, "skipped", "xfailed", "xpassed")


@dataclass
class Outcomes:
    """What one run recorded."""

    tests: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)  # of those that did not pass: the end of their error
    methods: dict[str, set[str]] = field(default_factory=dict)  # of the scheduler's mixin that ran, by test
    finished: bool = False

    @classmethod
    def read(cls, record: Path) -> Outcomes:
        """Raises nothing for a run that was cut off: its record ends anywhere."""
        outcomes = cls()
        for line in record.read_text().splitlines() if record.exists() else ():
            try:
                outcomes.add(json.loads(line))
            except ValueError:
                continue
        return outcomes

    def add(self, what: dict) -> None:
        if "finished" in what:
            self.finished = True
        elif "method" in what:
            self.methods.setdefault(what["test"], set()).add(what["method"])
        else:
            self.add_outcome(what["test"], what["when"], what["outcome"], what["text"])

    def add_outcome(self, test: str, when: str, outcome: str, text: str) -> None:
        """A test whose set-up or end fails is an error, whatever the test itself did."""
        outcome = "error" if outcome == "failed" and when != "call" else outcome
        if self.tests.get(test) in FAILED:
            return
        self.tests[test] = outcome
        if outcome != "passed":
            self.why[test] = text

    def replaced_by(self, again: Outcomes) -> Outcomes:
        """These, where the tests of `again` have the outcomes that they had there."""
        methods = {test: self.methods.get(test, set()) | again.methods.get(test, set()) for test in
                   self.methods.keys() | again.methods.keys()}  # fmt: skip
        return Outcomes(self.tests | again.tests, self.why | again.why, methods, self.finished and again.finished)

    def failed(self) -> dict[str, str]:
        return {test: outcome for test, outcome in self.tests.items() if outcome in FAILED}

    def with_mixin(self) -> int:
        """Tests in which one of the mixin's methods ran; not those in which a scheduler was made only."""
        return sum(1 for test, methods in self.methods.items() if test in self.tests and methods - {"__init__"})

    def with_scheduler(self) -> int:
        """Tests that made a scheduler with the mixin, or ran one of its methods."""
        return sum(1 for test in self.methods if test in self.tests)

    def __str__(self) -> str:
        count = Counter(self.tests.values())
        return ", ".join(f"{count[outcome]} {outcome}" for outcome in SHOWN if count[outcome]) or "none"


def differing(runs: dict[str, Outcomes], explained: dict[str, str]) -> dict[str, dict[str, str]]:
    """Tests whose outcome is not the same in all runs, and is not explained: the outcome in each run."""
    found = {}
    for test in sorted(set().union(*(run.tests for run in runs.values()))):
        of_runs = {name: run.tests.get(test, NOT_RUN) for name, run in runs.items()}
        if len(set(of_runs.values())) > 1 and without_parameters(test) not in explained:
            found[test] = of_runs
    return found


def without_parameters(test: str) -> str:
    return test.partition("[")[0]


def unlike_list(without: Outcomes, listed: dict[str, str]) -> list[str]:
    """What the list of the tests that fail without torpor has otherwise than this run."""
    failed = without.failed()
    return [f"fails without torpor, which the list does not say: {test}" for test in sorted(failed.keys() - listed)] + [
        f"is in the list of those that fail without torpor, and is {without.tests.get(test, NOT_RUN)}: {test}"
        for test in sorted(listed.keys() - failed)
    ]


def read_list(path: Path) -> dict[str, str]:
    """Tests, and why they fail; empty where there is no list."""
    lines = path.read_text().splitlines() if path.exists() else []
    split = (line.partition("  # ") for line in lines if line and not line.startswith("#"))
    return {test: why for test, _, why in split}


def text_of_list(version: str, without: Outcomes) -> str:
    """That list, as a file."""
    lines = [
        f"# Own tests of vLLM {version} that fail on a CPU without torpor; tools/dev vllm-tests --golden writes it."
    ]
    for test in sorted(without.failed()):
        why = re.sub(r" *'?/\S+", "", " ".join(without.why.get(test, "").split()))[:80]  # without paths of a machine
        lines.append(f"{test}  # {why}" if why else test)
    return "\n".join(lines) + "\n"
