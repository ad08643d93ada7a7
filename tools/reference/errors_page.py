# SPDX-License-Identifier: Apache-2.0
"""errors.md: the classes of torpor.errors with their codes, statuses of HTTP and exit codes."""

from __future__ import annotations

from reference.text import item, of_docstring, page, paragraph
from torpor import errors
from torpor.vllm.server.routes import _STATUS


def errors_page(manual: dict, problems: list[str]) -> str:
    """`manual`: of `torpor man --json`. Add to `problems` each code of C++ without a class, or a class without one."""
    classes = {cls.code: cls for cls in (*errors.Error.__subclasses__(), errors.Error)}
    exits = {each["error"]: each["exit_code"] for each in manual["errors"]}
    problems += [f"torpor.errors has no class of the code {name}" for name in exits.keys() - classes.keys()]
    problems += [f"base/status.h has no code {name} of torpor.errors" for name in classes.keys() - exits.keys()]
    return page(
        "Errors",
        of_docstring(errors.__doc__ or ""),
        paragraph("In Python an error is an exception. Text, JSON and HTTP have it as follows:"),
        "\n".join(
            (
                item("Python: `str(error)` is `what (next_step)`. `error.to_dict()` has all attributes."),
                item(
                    "command line: `torpor: code: what (next_step)` on standard error; with `--json` also "
                    '`{"error": {"code", "what", "next_step"}}`. The exit code is named below.'
                ),
                item(
                    'HTTP: `{"error": {"message", "type", "code", "what", "next_step", …}}`, with the status that is '
                    "named below. OpenAI's clients show its `message`."
                ),
            )
        ),
        *(_class(classes[name], exits[name]) for name in exits if name in classes),
    )


def _class(cls, exit_code: int) -> str:
    builtins = [f"`{base.__name__}`" for base in cls.__bases__ if base not in (errors.Error, Exception)]
    facts = [f"code: `{cls.code}`", f"status of torpor's routes: {_STATUS.get(cls, 500)}", f"exit code: {exit_code}"]
    if builtins:
        facts.insert(1, f"also: {', '.join(builtins)}")
    lead = of_docstring(cls.__doc__ or "")
    return "\n\n".join([f"## `{cls.__name__}`", lead, "\n".join(item(fact) for fact in facts)])
