# SPDX-License-Identifier: Apache-2.0
"""cli.md: the verbs of the program `torpor`, from `torpor man --json`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from reference.text import code, item, page, paragraph, plain, sentence

EXAMPLES = (
    ("The checkpoints of a directory:", "torpor ls examples/checkpoints"),
    ("What is in the newest one:", "torpor tree examples/checkpoints"),
    ("Its requests. Three run and one waits:", "torpor requests examples/checkpoints"),
    ("One of them:", "torpor show examples/checkpoints chat2 | head -n 13"),
    ("The KV blocks. The three chats share the first one:", "torpor blocks examples/checkpoints"),
    ("The prefixes that a later request would find:", "torpor prefix examples/checkpoints"),
    ("Who uses the space:", "torpor du examples/checkpoints"),
    ("What changed between two checkpoints. The exit code is 6:",
     "torpor diff examples/checkpoints/g-000001 examples/checkpoints/g-000002"),
    ("Whether every byte is whole:", "torpor verify examples/checkpoints"),
    ("Images of hibernated requests, and who was forked from whom:", "torpor tree examples/sessions/images"),
    ("How the branches differ. The exit code is 6:",
     "torpor diff examples/sessions/images/others examples/sessions/images/best"),
)  # fmt: skip


def examples(program: Path, root: Path) -> list[str]:
    """Return blocks that show commands on the example checkpoints, with what they print now."""
    blocks = [paragraph("[examples](../../examples/README.md) has checkpoints and images of a tiny model.")]
    for text, command in EXAMPLES:
        blocks += [paragraph(text), code(f"$ {command}\n{output_of(command, program, root)}")]
    return blocks


def output_of(command: str, program: Path, root: Path) -> str:
    """Return what a command prints in the folder `root`, without the path of that folder."""
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "NO_COLOR": "1"}
    done = subprocess.run(["bash", "-c", command], cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout.decode().replace(f"{root}/", "")


def command_page(manual: dict, example: list[str], problems: list[str]) -> str:
    """`example`: of examples(); none: no such section. Add to `problems` what lacks a text."""
    everywhere = _everywhere(manual)
    codes = "\n".join(item(f"`{each['code']}`: {plain(sentence(each['text']))}") for each in manual["exit_codes"])
    return page(
        "Command line: torpor",
        paragraph(plain(manual["description"])),
        paragraph("`tools/dev torpor` builds it if need be. See [the inspector](../../tools/torpor/README.md)."),
        "## Arguments of every command",
        "\n".join(_argument(each, problems) for each in everywhere),
        "## Exit codes",
        codes,
        *(["## Example", *example] if example else []),
        *(_verb(verb, everywhere, problems) for verb in manual["verbs"]),
    )


def _everywhere(manual: dict) -> list[dict]:
    """Return the arguments that every verb with answers in JSON has."""
    asked = [verb["arguments"] for verb in manual["verbs"] if verb["json"]]
    return [each for each in asked[0] if all(each in others for others in asked)]


def _verb(verb: dict, everywhere: list[dict], problems: list[str]) -> str:
    if not verb["text"]:
        problems.append(f"the verb {verb['name']} of torpor has no text")
    own = [each for each in verb["arguments"] if each not in everywhere]
    places = [_place(each) for each in own if each["positional"]]
    usage = " ".join(["torpor", verb["name"], *places, *(["[options]"] if len(places) < len(own) else [])])
    blocks = [f"## torpor {verb['name']}", paragraph(plain(sentence(verb["text"]))), code(usage)]
    if own:
        blocks.append("\n".join(_argument(each, problems) for each in own))
    if verb["json"]:
        blocks.append(paragraph(f"`--json`: {plain(verb['json'])}"))
    return "\n\n".join(blocks)


def _place(argument: dict) -> str:
    name = argument["name"].upper() + (" …" if argument["repeats"] else "")
    return name if argument["required"] else f"[{name}]"


def _argument(argument: dict, problems: list[str]) -> str:
    if not argument["text"]:
        problems.append(f"the argument {argument['name']} of torpor has no text")
    name = argument["name"].upper() if argument["positional"] else argument["name"].replace(",", ", ")
    taken = f" {argument['takes']}" if argument["takes"] else ""
    more = [f"Default: `{argument['default']}`."] if argument["default"] else []
    more += [f"Environment: `{argument['environment']}`."] if argument["environment"] else []
    more += ["Required."] if argument["required"] and not argument["positional"] else []
    return item(" ".join([f"`{name}{taken}`: {plain(sentence(argument['text']))}", *more]))
