"""What holds for every test: no deadline for property tests (a loaded core keeps none), no launcher's variables.

Unless torch's launcher started this process itself: then the tests are its ranks (tests/gpu).
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("unhurried", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("unhurried")

_LAUNCHED = "TORCHELASTIC_RUN_ID" in os.environ
for variable in (
    () if _LAUNCHED else ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
):
    os.environ.pop(variable, None)
