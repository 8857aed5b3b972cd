"""Tensors inside the arguments and results of a forward: nested tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Collection, MutableMapping
from typing import Any

import torch


def tensors(tree: Any) -> list[torch.Tensor]:
    """Every tensor, in a fixed order; ``map_tensors`` visits them in the same one."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []
    for child in _children(tree):
        found += [child] if isinstance(child, torch.Tensor) else tensors(child)
    return found


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The same structure with ``function`` applied to every tensor. What has no tensors stays the same object."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    old = _children(tree)
    if not old:
        return tree
    new = [function(child) if isinstance(child, torch.Tensor) else map_tensors(function, child) for child in old]
    if all(map(operator.is_, old, new)):
        return tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*new)
    if isinstance(tree, (tuple, list)):
        return type(tree)(new)
    if isinstance(tree, MutableMapping):
        mapped = copy.copy(tree)
        for key, value in zip(tree, new, strict=True):
            mapped[key] = value
        return mapped
    return dataclasses.replace(tree, **dict(zip(_field_names(tree), new, strict=True)))


def _children(tree: Any) -> Collection[Any]:
    if isinstance(tree, (tuple, list)):
        return tree
    if isinstance(tree, (dict, MutableMapping)):  # dict first: the abstract class takes ten times as long to ask
        return tree.values()
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, name) for name in _field_names(tree)]
    return ()


def _field_names(tree: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(tree) if field.init]
