"""The measurement of host cost runs without a GPU, says so, and measures every runtime that is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_host_cost_measures_the_runtimes_that_are_there(tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    command = [sys.executable, "scripts/benchmark", "--host", "--repeat", "1", "--calls", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=180)
    assert ("no GPU" in done.stdout) == (not torch.cuda.is_available())
    cases = json.loads(file.read_text())["cases"]
    measured = {(case["runtime"], case["bias"]) for case in cases if "unavailable" not in case}
    names = {"no FSDP", "fsdp_runtime process_group", "fsdp_runtime auto", "FSDP2"}
    assert measured >= {(name, bias) for name in names for bias in (False, True)}
    for case in cases:
        if "unavailable" not in case:
            assert case["no_grad_us"] > 0
            assert 0 < case["forward_us"] < case["step_us"]
            assert 0 < case["least_step_us"] <= case["step_us"]
            times, us = case["calls"]["aten::addmm" if case["bias"] else "aten::mm"]
            assert times >= 2  # a forward without and one with gradients
            assert us > 0
