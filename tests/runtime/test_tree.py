"""Tensors are found and replaced in whatever a forward takes and returns."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fsdp_runtime.tree import map_tensors, tensors

A, B, C = (torch.tensor(float(value)) for value in range(3))
Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Record:
    name: str
    value: Any


class Strict(OrderedDict):
    """As the outputs of some model libraries: a mapping that can be assigned to but not updated."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("cannot be updated")


STRUCTURES = [
    A,
    (A, [B, {"c": C}]),
    Pair(A, (B, "text")),
    Record("name", [A, B]),
    OrderedDict(b=B, a=A),
    ((), [], {}, None, 3, "text", torch.Size([2, 3])),
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: type(structure).__name__)
def test_replacing_tensors_keeps_structure_and_order(structure: Any) -> None:
    doubled = map_tensors(lambda tensor: tensor * 2 + 1, structure)
    assert type(doubled) is type(structure)
    assert [t.item() for t in tensors(doubled)] == [t.item() * 2 + 1 for t in tensors(structure)]
    assert list(tensors(map_tensors(lambda tensor: tensor, doubled))) == list(tensors(doubled))


def test_keys_and_other_values_stay() -> None:
    record = map_tensors(lambda tensor: tensor + 1, Record("name", {"x": A, "n": 5}))
    assert (record.name, record.value) == ("name", {"x": A + 1, "n": 5})


def test_what_has_no_tensors_stays_the_same_object() -> None:
    structure = [1, ("text", {"key": None})]
    assert map_tensors(lambda tensor: tensor + 1, structure) is structure


def test_a_mapping_is_copied_and_then_assigned_to() -> None:
    original = Strict()
    original["x"] = A
    mapped = map_tensors(lambda tensor: tensor + 1, original)
    assert type(mapped) is Strict
    assert (mapped["x"], original["x"]) == (A + 1, A)
