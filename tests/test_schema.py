"""The published schema: results are valid by it, it describes all that is written, and it refuses what is no result."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import render_runs as runs
from command_line import call
from jsonschema import Draft202012Validator

import overlap_probe as op
from overlap_probe import schema
from overlap_probe.render import to_dict
from overlap_probe.render.advice import CAUSE_MEANING
from overlap_probe.render.document import SCHEMA
from overlap_probe.results import OPS, SEVERITY, RunAnalysis

DATA = Path(__file__).parent / "data"
VALIDATOR = Draft202012Validator(schema.load())
LATE = [DATA / f"fsdp2_llama8_b4s1024_rank{rank}.json.gz" for rank in (0, 1)]


def real_results() -> Iterator[dict[str, Any]]:
    late = op.analyze_run(LATE, op.Options(what_if=True))
    yield to_dict(late, op.evaluate(late, ["overlaps >= auto", "hidden >= 10%", "slowdown <= 1ms"]))
    for name in ("linear8_p2p_inplace_implicit_rank0.json.gz", "nsys2024_gemm_copy.sqlite"):
        run = op.analyze_run(DATA / name)
        yield to_dict(run, op.evaluate(run, ["overlaps >= auto"], at_least="1/2"))


def made_up_results() -> Iterator[dict[str, Any]]:
    yield to_dict(runs.run_of_two(backward=True, problems=("rank 2 is missing",)), runs.failing_verdict())
    yield to_dict(runs.nasty_run(), runs.nasty_verdict())
    yield to_dict(RunAnalysis((runs.analysis(None, {"step0": runs.step(0, 0)}, process=12, device=1),)))
    yield to_dict(RunAnalysis(()))


def errors(result: Any, validator: Draft202012Validator = VALIDATOR) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(json.loads(json.dumps(result)))]


def closed(part: Any) -> Any:
    """The schema, allowing no key that it does not describe (but for the free-form `run`)."""
    if isinstance(part, list):
        return [closed(item) for item in part]
    if not isinstance(part, dict):
        return part
    made = {key: closed(value) for key, value in part.items()}
    if "properties" in part and "additionalProperties" not in part:
        made["unevaluatedProperties"] = False
    return made


def open_phase(whole: dict[str, Any]) -> dict[str, Any]:
    """The closed schema again; a phase is closed where it is used, since `backward` adds keys to it."""
    del whole["$defs"]["phase"]["unevaluatedProperties"]
    whole["$defs"]["window"]["properties"]["forward"]["unevaluatedProperties"] = False
    return whole


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(schema.load())


def test_every_result_is_valid_and_holds_nothing_that_is_not_described() -> None:
    strict = Draft202012Validator(open_phase(closed(schema.load())))
    for result in (*real_results(), *made_up_results()):
        assert errors(result) == []
        assert errors(result, strict) == []


def test_a_key_that_is_not_described_is_found_by_the_test_above() -> None:
    strict = Draft202012Validator(open_phase(closed(schema.load())))
    result = to_dict(runs.run_of_two(), runs.failing_verdict())
    window = result["traces"][0]["windows"]["step0"]
    for place in (result, window, window["forward"], window["backward"], window["collectives"][0], result["verdict"]):
        place["new"] = 1
        assert len(errors(result, strict)) == 1
        assert errors(result) == []  # further keys are welcome
        del place["new"]


def test_the_words_of_the_schema_are_those_of_the_code() -> None:
    definitions = schema.load()["$defs"]
    collective = definitions["collective"]["properties"]
    assert schema.load()["properties"]["schema"]["const"] == SCHEMA
    assert schema.load()["$id"].endswith(f":{SCHEMA}")
    assert collective["op"]["enum"] == list(OPS)
    assert set(definitions["window"]["properties"]) > set(OPS)
    assert collective["cause"]["enum"] == [*CAUSE_MEANING, None]
    assert definitions["status"]["enum"] == list(SEVERITY)


REQUIRED = [
    ("verdict",),
    ("traces", 0, "quality"),
    ("traces", 0, "windows", "whole"),
    ("traces", 0, "windows", "step0", "communication"),
    ("traces", 0, "windows", "step0", "backward", "reduce_found"),
    ("traces", 0, "windows", "step0", "all_gather", "slowdown_ns"),
    ("traces", 0, "windows", "step0", "collectives", 0, "cause"),
    ("verdict", "findings", 0, "status"),
]


@pytest.mark.parametrize("path", REQUIRED, ids=lambda path: path[-1])
def test_what_the_design_promises_is_required_and_typed(path: tuple[Any, ...]) -> None:
    good = to_dict(runs.run_of_two(backward=True), runs.failing_verdict())
    without, wrong = copy.deepcopy(good), copy.deepcopy(good)
    for result, change in (
        (without, lambda place: place.pop(path[-1])),
        (wrong, lambda place: place.update({path[-1]: 1.5})),
    ):
        place: Any = result
        for key in path[:-1]:
            place = place[key]
        change(place)
        assert errors(result)
    assert not errors(good)


def test_the_command_line_writes_what_the_published_file_describes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(capsys, "assert", *LATE, "--overlaps", "auto", "--json", tmp_path / "result.json").code == 1
    printed = subprocess.run([sys.executable, "-m", "overlap_probe.schema"], capture_output=True, text=True, timeout=60)
    published = json.loads(printed.stdout)
    assert published == schema.load()
    assert errors(json.loads((tmp_path / "result.json").read_text()), Draft202012Validator(published)) == []
