# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine with these options of torpor's, from which a request is asked to leave. Prints what
it said, and the answers after that."""

import json
import sys
import tempfile
from pathlib import Path

from conftest import InProcess

from torpor.errors import Error


def main(model: Path, options: dict, engine: dict) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        one = InProcess(model, Path(directory), torpor=options, **engine)
        names = ["greedy", "seeded"]
        expected = one.finish(one.begin(0, names))
        answers = one.begin(5, names)
        try:
            error = f"it left: {one.llm.torpor.hibernate('greedy')}"
        except Error as problem:
            error = str(problem)
        images = [image.id for image in one.llm.torpor.hibernated()]
        used = one.llm.torpor.ledger()[0].arena_used_bytes
        return {"error": error, "images": images, "used": used, "answers": one.finish(answers), "expected": expected}


if __name__ == "__main__":
    words = [json.loads(word) for word in sys.argv[2:]]
    print("RESULT " + json.dumps(main(Path(sys.argv[1]), words[0], words[1] if len(words) > 1 else {})), flush=True)
