"""What holds for every test: no deadline for property tests (a loaded core keeps none), no launcher's variables."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("unhurried", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("unhurried")

for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(variable, None)
