"""The benchmark runs from a clone and writes what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_benchmark_measures_a_trace_and_writes_the_numbers(tmp_path: Path) -> None:
    trace = ROOT / "tests" / "data" / "linear8_ring_prefetch_rank0.json.gz"
    command = [sys.executable, str(ROOT / "scripts" / "benchmark"), str(trace), "--repeat", "2"]
    command += ["--nsys-kernels", "3000"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "b.json")], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert trace.name in done.stdout
    result = json.loads((tmp_path / "b.json").read_text())
    (measured,) = result["traces"]
    assert measured["json_bytes"] == 286381
    assert len(measured["cpu_s"]) == 2
    assert measured["mb_per_cpu_s"] == measured["json_bytes"] / min(measured["cpu_s"]) / 1e6
    assert 0 < measured["peak_bytes"] < 2 * measured["json_bytes"] + (64 << 20)
    assert result["command_wall_s"] > 0
    assert result["hta"] is None
    assert "nsys database, 3000 kernels" in done.stdout
    assert result["nsys"]["kernels"] == 3000
    assert len(result["nsys"]["cpu_s"]) == 2
    assert 0 < result["nsys"]["peak_bytes"] + result["nsys"]["imported_bytes"] < 3_000_000_000
