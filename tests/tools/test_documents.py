"""Documents name only what exists, and sources keep to their rooms; and the checks themselves find what they should."""

import subprocess

from conftest import ROOT
from devtool import checks


def test_documents_and_sources_are_in_order():
    assert checks.all_problems(ROOT) == []


def test_every_folder_has_a_readme():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    rooms = {name.split("/")[0] for name in tracked if "/" in name and not name.startswith(".")} - {"docs", "cmake"}
    rooms |= {"tools/" + name.split("/")[1] for name in tracked if name.startswith("tools/") and name.count("/") > 1}
    missing = [room for room in sorted(rooms) if not (ROOT / room / "README.md").exists()]
    assert missing == []


def test_the_checks_find_planted_problems(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "base").mkdir()
    (tmp_path / "README.md").write_text("See `base/none.h` and [this](docs/none.md), and `base/here.h`.")
    (tmp_path / "base/here.h").write_text("#include <pybind11/pybind11.h>\n")
    (tmp_path / "base/use.py").write_text("import pickle\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/mutants.toml").write_text(
        '[[mutant]]\nname = "stale"\nfile = "base/here.h"\nreplace = "gone"\n\n'
        '[[mutant]]\nname = "fresh"\nfile = "base/here.h"\nreplace = "pybind11/pybind11"\n'
    )
    found = "\n".join(checks.all_problems(tmp_path))
    for part in ("base/none.h", "docs/none.md", "pybind11", "imports pickle", "'stale'"):
        assert part in found
    assert "names base/here.h" not in found and "'fresh'" not in found
