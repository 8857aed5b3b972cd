"""Where the published JSON Schema of a result is; ``python -m overlap_probe.schema`` prints it.

The idea: the schema is a file that any validator can read. Tests hold it against real results, so that it cannot drift.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("schema.json")


def load() -> dict[str, Any]:
    """The schema (draft 2020-12) of what ``--json`` writes, as `render.to_dict` makes it."""
    return dict(json.loads(PATH.read_text(encoding="utf-8")))


if __name__ == "__main__":
    print(PATH.read_text(encoding="utf-8"), end="")
