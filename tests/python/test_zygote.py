# SPDX-License-Identifier: Apache-2.0
"""A process that is forked from the zygote (zygote.py) has what a new interpreter would have from its environment. What
such a process leaves behind does not pile up."""

import os
import subprocess

import psutil
from zygote import wait_for_orphans

CODE = "import builtins; print(getattr(builtins, 'customized', 'not customized'))"


def test_a_sitecustomize_on_its_path_is_imported(zygote, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins, os\ndef word():\n    return 'customized in ' + os.getcwd()\nbuiltins.customized = word()\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with_it = zygote.run(["-c", CODE], env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path)
    assert with_it.stdout == f"customized in {tmp_path}\n", with_it.stderr
    without = zygote.run(["-c", CODE], env=os.environ, cwd=tmp_path)
    assert without.stdout == "not customized\n", without.stderr


def test_orphans_are_waited_for_and_what_has_just_ended_is_left_to_its_test(zygote):
    # Not of subprocess, which would take the end of one that has ended already.
    done = zygote.run(["-c", "import os; print(os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '0'))"])
    orphan = psutil.Process(int(done.stdout))
    os.waitid(os.P_PID, orphan.pid, os.WEXITED | os.WNOWAIT)
    wait_for_orphans()
    assert orphan.is_running()
    ours = subprocess.Popen(["sh", "-c", "exit 7"])
    os.waitid(os.P_PID, ours.pid, os.WEXITED | os.WNOWAIT)
    wait_for_orphans()
    assert not orphan.is_running()
    assert ours.wait() == 7
