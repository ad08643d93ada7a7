# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: vLLM as torpor finds it, with nothing replaced. Prints what its source says otherwise."""

import json
from pathlib import Path

import vllm

from torpor.vllm import compat
from torpor.vllm.compat import imported
from torpor.vllm.compat.guards import Class
from torpor.vllm.compat.source import SourceTree

NOT_THERE = "torpor_has_no_such_name"


def signature(owner, name: str) -> str:
    try:
        return owner.signature(name)
    except LookupError as problem:
        return f"({problem.args[0]})"


def of_class(cls, expected: Class) -> dict:
    names = expected.touched() | {NOT_THERE}
    return {
        "fields": cls.fields(),
        "signatures": {name: signature(cls, name) for name in expected.calls},
        "properties": {name: cls.is_property(name) for name in expected.properties.split() if cls.has(name)},
        "has": {name for name in names - set(expected.fields.split()) if cls.has(name)},
    }


def differences(read, seen, expected) -> list[str]:
    found = [name for name in (*expected.imported(), NOT_THERE) if read.has(name) != seen.has(name)]
    found += [name for name in expected.functions if signature(read, name) != signature(seen, name)]
    for cls in expected.classes:
        source, there = of_class(read.cls(cls.name), cls), of_class(seen.cls(cls.name), cls)
        other = [what for what in source if source[what] != there[what]]
        found += [f"{cls.name}, {what}: {source[what]}, imported {there[what]}" for what in other]
    return found


def main() -> None:
    tree = SourceTree(Path(vllm.__file__).parent)
    modules = [module for part in compat.manifest(vllm.__version__).PARTS.values() for module in part]
    result = {m.name: differences(tree.module(m.name), imported.module(m.name), m) for m in modules}
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
