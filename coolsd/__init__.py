"""coolsd: draft heads for autoregressive image models, decoded under annealed relaxation (Cool-SD).

The public names, imported on first use: `import coolsd` itself imports nothing, torch included.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "load_target": "coolsd.targets",
    "load_head": "coolsd.heads.checkpoint",
    "generate": "coolsd.decode",
    "autoregressive": "coolsd.decode",
    "Sampling": "coolsd.sampling",
    "Chain": "coolsd.drafters.chain",
    "StaticTree": "coolsd.drafters.static_tree",
    "DynamicTree": "coolsd.drafters.dynamic_tree",
    "Jacobi": "coolsd.drafters.jacobi",
    "Vanilla": "coolsd.rules.relaxed",
    "Uniform": "coolsd.rules.relaxed",
    "CoolSD": "coolsd.rules.relaxed",
    "LinearSD": "coolsd.rules.relaxed",
    "Lantern": "coolsd.rules.lantern",
    "LanternPP": "coolsd.rules.lantern",
    "Grouped": "coolsd.rules.grouped",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from coolsd.decode import autoregressive, generate
    from coolsd.drafters.chain import Chain
    from coolsd.drafters.dynamic_tree import DynamicTree
    from coolsd.drafters.jacobi import Jacobi
    from coolsd.drafters.static_tree import StaticTree
    from coolsd.heads.checkpoint import load_head
    from coolsd.rules.grouped import Grouped
    from coolsd.rules.lantern import Lantern, LanternPP
    from coolsd.rules.relaxed import CoolSD, LinearSD, Uniform, Vanilla
    from coolsd.sampling import Sampling
    from coolsd.targets import load_target


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'coolsd' has no attribute {name!r}; its names are {', '.join(sorted(_HOME))}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
