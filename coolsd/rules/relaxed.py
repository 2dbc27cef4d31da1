"""Acceptance rules whose relaxed mass is a multiple of the target's: r(x) = w p(x), A = min(q, w p).

They differ in the schedule w_1 .. w_L over draft depths only (THEORY.md section 3). p = target, q = draft.
Also what rules of other kinds share with them: checks of parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LARGEST = 1e6  # delta; float32 ends at 3e38, and schedules multiply it


class _Relaxed:
    lossless = False

    def accepted_mass(self, target_probs: Tensor, draft_probs: Tensor, relaxation: Tensor) -> Tensor:
        return torch.minimum(draft_probs, relaxation * target_probs)


def check(name: str, value: float, fine: bool, limit: str) -> None:
    """ValueError that names the value and its limit, unless it is finite and fine."""
    if not (math.isfinite(value) and fine):
        raise ValueError(f"{name} is {value}, but must be {limit}")


def check_delta(rule: str, delta: float, meaning: str) -> None:
    check(f"{rule} delta", delta, 0 < delta <= LARGEST, f"a number > 0 and <= {LARGEST:g} ({meaning})")


def check_resampling(rule: Any) -> None:
    if rule.resampling not in ("optimal", "own"):
        raise ValueError(f"{type(rule).__name__} resampling is {rule.resampling!r}, but must be 'optimal' or 'own'")


@dataclass(frozen=True)
class Vanilla(_Relaxed):
    """Lossless speculative sampling (Leviathan et al. 2023; EAGLE-1): w = 1."""

    lossless = True

    def schedule(self, length: int) -> Tensor:
        return torch.ones(length)


@dataclass(frozen=True)
class Uniform(_Relaxed):
    """UniformRSD of the Cool-SD paper: w_i = delta at every depth. delta = 1 is vanilla."""

    delta: float = 1.1

    def __post_init__(self) -> None:
        check_delta("Uniform", self.delta, "1 = lossless, larger = faster")

    def schedule(self, length: int) -> Tensor:
        return torch.full((length,), float(self.delta))


@dataclass(frozen=True)
class CoolSD(_Relaxed):
    """Cool-SD (AAAI 2026, arXiv 2601.09212): annealed w_i = delta exp(-nu i) / mean_j exp(-nu j), so mean(w) = delta.

    floor: lower bound of w_i. None is the paper; 1.0 never tightens below vanilla, which keeps the bound and
    lengthens acceptance (THEORY.md section 3). length: depth over which the mean is taken, None = the drafter's.
    """

    delta: float = 1.1
    nu: float = 0.7
    floor: float | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        check_delta("CoolSD", self.delta, "the mean relaxation; the paper uses 1.1 and 2")
        check("CoolSD nu", self.nu, self.nu >= 0, "a number >= 0 (0 = uniform; the paper uses 0.7)")
        if self.floor is not None:
            check("CoolSD floor", self.floor, self.floor >= 0, "None or a number >= 0 (1.0 = never below vanilla)")
        if self.length is not None:
            check(
                "CoolSD length",
                self.length,
                isinstance(self.length, int) and self.length >= 1,
                "None or an integer >= 1",
            )

    def schedule(self, length: int) -> Tensor:
        span = self.length or length
        decay = torch.exp(-self.nu * torch.arange(max(span, length), dtype=torch.float64))
        weights = (self.delta * decay / decay[:span].mean())[:length].float()
        return weights if self.floor is None else weights.clamp(min=self.floor)


@dataclass(frozen=True)
class LinearSD(_Relaxed):
    """Linear annealing, the Cool-SD paper's ablation: w_i = 2 delta (L + 1 - i) / (L + 1), so mean(w) = delta.

    floor: lower bound of w_i, as in `CoolSD`.
    """

    delta: float = 1.1
    floor: float | None = None

    def __post_init__(self) -> None:
        check_delta("LinearSD", self.delta, "the mean relaxation")
        if self.floor is not None:
            check("LinearSD floor", self.floor, self.floor >= 0, "None or a number >= 0 (1.0 = never below vanilla)")

    def schedule(self, length: int) -> Tensor:
        weights = 2 * self.delta * torch.arange(length, 0, -1) / (length + 1)
        return weights if self.floor is None else weights.clamp(min=self.floor)
