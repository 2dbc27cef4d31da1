"""Rules and drafters as a person names them: a short name with its numbers, or a class path.

Knows names and what a report says of them; knows no target, no loop and no file format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from coolsd.drafters.chain import Chain, HeadDrafter
from coolsd.drafters.dynamic_tree import DynamicTree
from coolsd.drafters.jacobi import Jacobi
from coolsd.drafters.static_tree import StaticTree
from coolsd.heads.eagle import EagleHead
from coolsd.interfaces import AcceptanceRule, AcceptProbs
from coolsd.rules.grouped import Grouped
from coolsd.rules.lantern import Lantern, LanternPP
from coolsd.rules.relaxed import CoolSD, LinearSD, Uniform, Vanilla

RULES: dict[str, type] = {
    "vanilla": Vanilla,
    "uniform": Uniform,
    "cool-sd": CoolSD,
    "linear-sd": LinearSD,
    "lantern": Lantern,
    "lantern++": LanternPP,
    "grouped": Grouped,
}
DRAFTERS: dict[str, Callable[..., Any]] = {
    "chain": Chain,
    "eagle-25": partial(StaticTree, shape="eagle-25"),
    "lantern-57": partial(StaticTree, shape="lantern-57"),
    "dynamic-tree": DynamicTree,
    "sjd": Jacobi,
    "scd": partial(Jacobi, coupling="gumbel"),
}
LENGTHS = {"chain": "length", "sjd": "window", "scd": "window"}  # what --length is to those who have one

Rule: TypeAlias = AcceptanceRule | AcceptProbs | str
# a class that still wants its head, a drafter that needs none, or a name above
Drafting: TypeAlias = Callable[[EagleHead], HeadDrafter] | Jacobi | str


def make_rule(rule: Rule, **settings: Any) -> Any:
    """A rule by its short name and those of its settings that are not None; a rule object is returned as it is."""
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


def needs_head(drafter: Drafting) -> bool:
    """Whether it drafts with a head; Jacobi decoding drafts with the target itself."""
    known = DRAFTERS.get(drafter) if isinstance(drafter, str) else drafter
    return not isinstance(known, Jacobi) and getattr(known, "func", known) is not Jacobi


def make_drafter(drafter: Drafting, head: EagleHead | None, length: int | None = None) -> Any:
    """A drafter by its short name and length, or given by class_path, on `head` where it needs one."""
    if not isinstance(drafter, str):
        if length is not None:
            raise ValueError("length: a drafter given by class_path takes its length as one of its init_args")
        return drafter if isinstance(drafter, Jacobi) else drafter(head)  # type: ignore[arg-type]
    if drafter not in DRAFTERS:
        raise ValueError(f"no drafter named {drafter!r}; choose one of {', '.join(DRAFTERS)}, or give a class_path")
    if length is not None and drafter not in LENGTHS:
        raise ValueError(f"length: drafter {drafter} has a shape of its own; {', '.join(LENGTHS)} take a length")
    settings = {} if length is None else {LENGTHS[drafter]: length}
    return DRAFTERS[drafter](head, **settings) if needs_head(drafter) else DRAFTERS[drafter](**settings)


def describe_rule(rule: Any, depth: int) -> dict[str, Any]:
    """{"name", its numbers, "schedule": w of each depth, where it has one}, for JSON."""
    is_dataclass = dataclasses.is_dataclass(rule) and not isinstance(rule, type)
    plain = (str, int, float, bool, type(None))
    held = {name: value for name, value in getattr(rule, "__dict__", {}).items() if isinstance(value, plain)}
    numbers = dataclasses.asdict(rule) if is_dataclass else held
    schedule = {"schedule": rule.schedule(depth).tolist()} if hasattr(rule, "schedule") else {}
    name = next((name for name, known in RULES.items() if known is type(rule)), _path(rule))
    return {"name": name, **numbers, **schedule}


def describe_drafter(drafter: Any, head: str) -> dict[str, Any]:
    """{"name", "depth", "nodes", its other settings, "head": which head it drafts with, or None}, for JSON."""
    names = {Chain: "chain", StaticTree: "static-tree", DynamicTree: "dynamic-tree", Jacobi: "jacobi"}
    settings = {
        name: getattr(drafter, name) for name in ("shape", "branch", "init", "coupling") if hasattr(drafter, name)
    }
    found = {"name": names.get(type(drafter)) or _path(drafter), "depth": drafter.depth, "nodes": drafter.nodes}
    return {**found, **settings, "head": None if isinstance(drafter, Jacobi) else head}


def _path(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
