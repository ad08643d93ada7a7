# SPDX-License-Identifier: Apache-2.0
"""A process that is forked from the zygote (zygote.py) has what a new interpreter would have from its environment."""

import os

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
