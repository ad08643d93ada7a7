# SPDX-License-Identifier: Apache-2.0
"""How torpor's routes say what is wrong: as vLLM and OpenAI's clients have it, with the fields of torpor's errors."""

from __future__ import annotations

from torpor.errors import Error


def content_of(problem: Error) -> dict:
    """Return the body of a refusal. OpenAI's clients show `message`; `code` is torpor's word for the kind of error."""
    return {"error": {"message": str(problem), "type": type(problem).__name__, **problem.to_dict()}}
