"""LANTERN and LANTERN++: a code may stand for codes that look like it.  r(x) = p(x) + mass of nearest codes of x.

The mass is added nearest code first, for as long as what is added stays within a limit (THEORY.md section 3).
p = target, q = draft, m = how many of the k nearest codes were added.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from coolsd.rules.neighbours import CHUNK, neighbours
from coolsd.rules.relaxed import check, check_resampling
from coolsd.sampling import residual

Bound = TypeVar("Bound", bound="_Neighbourhood")


class _Neighbourhood(ABC):
    """What both rules share. `bind` gives the rule the target's codebook; only a bound rule can accept."""

    lossless = False
    k: int
    bound: float
    resampling: str
    spares_target: bool = False  # no field either: see `resample`
    neighbours: Tensor  # int32 [V, min(k + 1, V - 1)], nearest first; no field, so that no report lists it

    def _check_k(self) -> None:
        check(f"{type(self).__name__} k", self.k, isinstance(self.k, int) and self.k >= 1, "an integer >= 1")
        check_resampling(self)

    @abstractmethod
    def _limit(self, own: Tensor) -> Tensor:
        """Most mass that may be added to p(x) = own."""

    def bind(self: Bound, target: Any) -> Bound:
        """This rule on the codebook of `target`. Raises ValueError where k is not below the number of codes.

        Distance is Euclidean between codes as stored, not normalised, as in the public code. The table is kept in the
        target's folder, if it was loaded from one (`coolsd.rules.neighbours`).
        """
        codebook = target.codebook().to(target.device)
        if self.k >= len(codebook):
            raise ValueError(
                f"{type(self).__name__} k is {self.k}, but must be at most {len(codebook) - 1}: each of the target's "
                f"{len(codebook)} codes has that many others"
            )
        bound = copy.copy(self)
        object.__setattr__(bound, "spares_target", getattr(target, "layout", None) is not None)
        table = neighbours(codebook, min(self.k + 1, len(codebook) - 1), getattr(target, "folder", None))
        object.__setattr__(bound, "neighbours", table)
        return bound

    def schedule(self, length: int) -> Tensor:
        """Ones: the rule is the same at every depth."""
        return torch.ones(length)

    def _added(self, own: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
        """own [...] = p(x), near [..., k] = p of its nearest codes -> the mass added [...], and whether m > 0 [...]."""
        total = near.cumsum(-1)
        fits = total <= self._limit(own)[..., None]  # a prefix: total never falls, so nothing fits behind a misfit
        return total.mul_(fits).amax(-1), fits[..., 0]

    def _added_at(self, target_probs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """`_added` for tokens [..., K] alone."""
        near = self.neighbours[tokens][..., : self.k]
        mass = target_probs.gather(-1, near.flatten(-2).long()).unflatten(-1, near.shape[-2:])
        return self._added(target_probs.gather(-1, tokens), mass)

    def accepted_mass(self, target_probs: Tensor, draft_probs: Tensor, relaxation: Tensor) -> Tensor:
        """A = min(q, r) of all codes [..., V]. Costs V k per position; `relaxation` plays no part."""
        most = CHUNK << 4 if target_probs.is_cuda else CHUNK  # fewer launches, and what a CPU's cache holds
        codes = max(1, most // (target_probs[..., 0].numel() * self.k))  # at a time
        tables = self.neighbours[:, : self.k].split(codes)
        added = [
            self._added(own, target_probs.index_select(-1, near.flatten()).unflatten(-1, near.shape))[0]
            for own, near in zip(target_probs.split(codes, -1), tables, strict=True)
        ]
        return torch.minimum(draft_probs, target_probs + torch.cat(added, -1))

    def accepted_at(self, target_probs: Tensor, draft_probs: Tensor, relaxation: Tensor, tokens: Tensor) -> Tensor:
        """A = min(q, r) of tokens long [..., K] alone, [..., K]. Costs K k per position."""
        added, _ = self._added_at(target_probs, tokens)
        return torch.minimum(draft_probs.gather(-1, tokens), target_probs.gather(-1, tokens) + added)

    def resample(self, target_probs: Tensor, draft_probs: Tensor, relaxation: Tensor, token: Tensor) -> Tensor:
        """Law [B, V] after `token` [B, 1] was rejected, as the public code of LANTERN has it for static trees.

        normalise(relu(p - d)), d = q; where m > 0, d is 0 at the first k + 1 codes near the token (not at those m that
        were added; k + 1 because the code counts the token itself, which its table leaves out) and is not normalised.
        Hence m = 0 is the vanilla residual, but m > 0 without any mass (p = 0 there) is not. For a target that forces
        tokens (Lumina-mGPT) the public code has a file of its own, where at those k + 1 codes p is 0 instead of d.
        The public code gives a uniform law over the vocabulary where nothing is owed, and NaN where siblings hold all
        of q: here both give p. A token without draft mass leaves p as it is. Its dynamic trees remove the token and
        its k + 1 nearest codes from p instead; here one-hot tests of chosen drafts follow the static rule too.
        """
        _, some = self._added_at(target_probs, token)
        near = self.neighbours[token[:, 0]].long()
        spared = torch.zeros_like(draft_probs, dtype=torch.bool).scatter(1, near, True) & some
        kept = target_probs if self.spares_target else torch.zeros_like(draft_probs)  # relu(p - p) = relu(0 - d) = 0
        law = residual(target_probs, torch.where(spared, kept, draft_probs))
        return torch.where(draft_probs.gather(1, token) > 0, law, target_probs)


@dataclass(frozen=True)
class Lantern(_Neighbourhood):
    """LANTERN (ICLR 2025, arXiv 2410.03355): at most `bound` is added to p(x), from the k nearest codes of x.

    bound: 0 to 1 (1 = all k; the public code reads a larger one as LANTERN++'s).
    resampling: "optimal" (THEORY.md section 1), or "own", the public code's (see `resample`).
    """

    k: int = 1000
    bound: float = 0.1
    resampling: str = "optimal"

    def __post_init__(self) -> None:
        self._check_k()
        check("Lantern bound", self.bound, 0 <= self.bound <= 1, "from 0 to 1 (LanternPP takes one above 1)")

    def _limit(self, own: Tensor) -> Tensor:
        return torch.full_like(own, self.bound if self.bound < 1 else torch.inf)  # sums of p may round to above 1


@dataclass(frozen=True)
class LanternPP(_Neighbourhood):
    """LANTERN++ (arXiv 2502.06352): at most (bound - 1) p(x) is added to p(x), from the k nearest codes of x.

    bound: above 1; r(x) is at most bound * p(x). Where p(x) = 0 nothing is added.
    resampling: "optimal" (THEORY.md section 1), or "own", the public code's (see `resample`).
    """

    k: int = 10
    bound: float = 2.0
    resampling: str = "optimal"

    def __post_init__(self) -> None:
        self._check_k()
        check("LanternPP bound", self.bound, self.bound > 1, "a number above 1 (Lantern takes one from 0 to 1)")

    def _limit(self, own: Tensor) -> Tensor:
        return (self.bound - 1) * own
