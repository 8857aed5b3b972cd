"""Which parameters belong to a unit, and every place where each of them is registered.

A slot keeps the module's parameter dictionary, not the module: nothing in the runtime may refer to a module, because
modules refer to the runtime (through their hooks) and a cycle would keep a deleted model's memory until the garbage
collector runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .errors import FsdpError

UNIT_ATTRIBUTE = "_fsdp_unit"
"""Attribute of a module that ``fully_shard`` was applied to."""

_OWNER_ATTRIBUTE = "_fsdp_owner"
"""Attribute of an original parameter that a unit took: a slot elsewhere that still holds it is tied across units."""


@dataclass(frozen=True)
class Slot:
    """One registration of a parameter: in the dictionary of its module, under its name there."""

    parameters: dict[str, nn.Parameter | None]
    name: str

    def assign(self, parameter: nn.Parameter) -> None:
        """Registers another parameter. Past ``Module.__setattr__``, which costs more than all the rest of a swap."""
        self.parameters[self.name] = parameter


@dataclass
class Registration:
    """One parameter, tied or not: its first dotted name below the unit and all slots that hold it."""

    name: str
    parameter: nn.Parameter
    slots: list[Slot] = field(default_factory=list)


def collect(module: nn.Module) -> list[Registration]:
    """The parameters of ``module`` that no unit below it has taken, in registration order.

    Raises FsdpError, naming the parameter, for those that cannot be sharded.
    """
    found: dict[nn.Parameter, Registration] = {}
    for prefix, owner in _own_modules(module, "", set()):
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if parameter not in found:
                _check(f"{prefix}{name}", parameter, module)
                found[parameter] = Registration(f"{prefix}{name}", parameter)
            found[parameter].slots.append(Slot(owner._parameters, name))
    return list(found.values())


def mark_taken(registrations: list[Registration], module: nn.Module) -> None:
    """Remembers that ``module`` has taken these parameters, so that another unit that is tied to them finds out."""
    for registration in registrations:
        setattr(registration.parameter, _OWNER_ATTRIBUTE, type(module).__name__)


def _own_modules(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The module and its descendants with their dotted prefixes, without units and what is below them."""
    seen.add(module)
    yield prefix, module
    for name, child in module.named_children():
        if child not in seen and UNIT_ATTRIBUTE not in child.__dict__:
            yield from _own_modules(child, f"{prefix}{name}.", seen)


def _check(name: str, parameter: nn.Parameter, module: nn.Module) -> None:
    unit = type(module).__name__
    taken_by = getattr(parameter, _OWNER_ATTRIBUTE, None)
    if taken_by is not None:
        raise FsdpError(
            f"parameter {name} of {unit}: tied to a parameter that the unit {taken_by} has already sharded; "
            "leave all modules that share it to one unit, for example their common parent"
        )
    if isinstance(parameter, DTensor):
        raise FsdpError(
            f"parameter {name} of {unit}: already a DTensor; call fully_shard bottom-up (children first, the parent's "
            "call last), once a module; tensor parallel parameters and modules shared by two units are not supported"
        )
    if is_lazy(parameter):
        raise FsdpError(f"parameter {name} of {unit}: not initialised yet; run the lazy module once before fully_shard")
    if is_traceable_wrapper_subclass(parameter):
        raise FsdpError(
            f"parameter {name} of {unit}: {type(parameter.data).__name__} is not supported; use plain tensors"
        )
    if parameter.ndim == 0:
        raise FsdpError(f"parameter {name} of {unit}: a scalar has no rows to shard; give it the shape [1]")
