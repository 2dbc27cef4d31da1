"""Rules and drafters as a person names them: a short name with its numbers, or a class path.

Knows names and what a report says of them; knows no target, no loop and no file format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

from coolsd.drafters.chain import Chain
from coolsd.heads.eagle import EagleHead
from coolsd.interfaces import AcceptanceRule
from coolsd.rules.relaxed import CoolSD, Uniform, Vanilla

RULES: dict[str, type] = {"vanilla": Vanilla, "uniform": Uniform, "cool-sd": CoolSD}
DRAFTERS: dict[str, type] = {"chain": Chain}

Rule: TypeAlias = AcceptanceRule | str
Drafting: TypeAlias = Callable[[EagleHead], Chain] | str  # a class that still wants its head, or a name above


def make_rule(rule: Rule, delta: float | None = None, nu: float | None = None, floor: float | None = None) -> Any:
    """A rule by its short name and those of its numbers that are given; a rule object is returned as it is."""
    settings = {"delta": delta, "nu": nu, "floor": floor}
    given = {name: value for name, value in settings.items() if value is not None}
    if not isinstance(rule, str):
        if given:
            raise ValueError(f"{', '.join(given)}: a rule given by class_path takes its numbers as its init_args")
        return rule
    if rule not in RULES:
        raise ValueError(f"no rule named {rule!r}; choose one of {', '.join(RULES)}, or give a class_path")
    known = {field.name for field in dataclasses.fields(RULES[rule])}
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"rule {rule} has no {', '.join(unknown)}; it takes {', '.join(sorted(known)) or 'nothing'}")
    return RULES[rule](**given)


def make_drafter(drafter: Drafting, head: EagleHead, length: int | None = None) -> Any:
    """A drafter by its short name and length, or from a class given by class_path, on `head`."""
    if not isinstance(drafter, str):
        if length is not None:
            raise ValueError("length: a drafter given by class_path takes its length as one of its init_args")
        return drafter(head)
    if drafter not in DRAFTERS:
        raise ValueError(f"no drafter named {drafter!r}; choose one of {', '.join(DRAFTERS)}, or give a class_path")
    return DRAFTERS[drafter](head) if length is None else DRAFTERS[drafter](head, length)


def describe_rule(rule: Any, depth: int) -> dict[str, Any]:
    """{"name", its numbers, "schedule": w of each depth, where it has one}, for JSON."""
    numbers = dataclasses.asdict(rule) if dataclasses.is_dataclass(rule) and not isinstance(rule, type) else {}
    schedule = {"schedule": rule.schedule(depth).tolist()} if hasattr(rule, "schedule") else {}
    return {"name": _name(rule, RULES), **numbers, **schedule}


def describe_drafter(drafter: Any, head: str) -> dict[str, Any]:
    """{"name", "depth", "nodes", "head": which head it drafts with}, for JSON."""
    return {"name": _name(drafter, DRAFTERS), "depth": drafter.depth, "nodes": drafter.nodes, "head": head}


def _name(thing: Any, names: dict[str, type]) -> str:
    kind = type(thing)
    return next((name for name, known in names.items() if known is kind), f"{kind.__module__}.{kind.__qualname__}")
