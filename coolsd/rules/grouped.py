"""Grouped speculative decoding (GSD): tokens of similar probability and embedding are accepted as one.

f(x) = min(1, P / Q), P and Q = what target and draft give to the cluster of x (arXiv 2508.07747).
p = target, q = draft.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coolsd.rules.neighbours import CHUNK, digest, keep
from coolsd.rules.relaxed import check, check_resampling
from coolsd.sampling import residual


@dataclass(frozen=True)
class Grouped:
    """GSD. y is in the cluster of x where all three hold:

        rank(y) in [rank(x) - window / 2, rank(x) + window / 2), ranks by p, smallest first, equals by number
        |p(y) - p(x)| < max_prob_gap
        |e(y) - e(x)|^2 < max_distance, e = the target's input embedding

    As in the public code, the window / 2 least likely tokens have no cluster (f = min(1, p / q)) while the likeliest
    have the part of it that exists. Its other quirk, that a window with an id above 10000 skips the distance, is left
    out. resampling: "optimal" (THEORY.md section 1), or "own" = normalise(relu(p - q)), as in the public code.
    """

    window: int = 14
    max_prob_gap: float = 0.15
    max_distance: float = 0.5
    resampling: str = "optimal"

    lossless = False

    def __post_init__(self) -> None:
        fine = isinstance(self.window, int) and self.window >= 2 and self.window % 2 == 0
        check("Grouped window", self.window, fine, "an even integer >= 2 (the paper uses 14)")
        check("Grouped max_prob_gap", self.max_prob_gap, self.max_prob_gap > 0, "a number > 0 (the paper uses 0.15)")
        check("Grouped max_distance", self.max_distance, self.max_distance > 0, "a number > 0 (the paper uses 0.5)")
        check_resampling(self)

    def bind(self, target: Any) -> Grouped:
        """This rule on the input embedding of `target`: which pairs of tokens are close, bool [V, V] in memory."""
        embedding = target.ends()["embedding"]
        bound = copy.copy(self)
        key = (digest(embedding), self.max_distance, embedding.device)
        object.__setattr__(bound, "close", keep(key, lambda: close_pairs(embedding, self.max_distance)))
        return bound

    def schedule(self, length: int) -> Tensor:
        """Ones: the rule is the same at every depth."""
        return torch.ones(length)

    def accepted_mass(self, target_probs: Tensor, draft_probs: Tensor, relaxation: Tensor) -> Tensor:
        """A = q min(1, P / Q), [..., V]; `relaxation` plays no part. Only a bound rule can accept."""
        close: Tensor = self.close  # type: ignore[attr-defined]
        half, (p, order) = self.window // 2, target_probs.sort(dim=-1, stable=True)
        q = draft_probs.gather(-1, order)
        target, draft = p.clone(), q.clone()  # P and Q; a token is in its own cluster
        # ranks  0 1 2 3 4 5 6      shifted by 2: pairs (0, 2), (1, 3), ... = low, high
        #        l . h . . . .      low is in the lower half of high's window, high in the upper half of low's,
        #        . l . h . . .      which is one rank shorter
        for shift in range(1, half + 1):
            low, high = slice(None, max(0, p.shape[-1] - shift)), slice(shift, None)
            same = close[order[..., low], order[..., high]] & (p[..., high] - p[..., low] < self.max_prob_gap)
            for mass, total in ((p, target), (q, draft)):
                total[..., high] += same * mass[..., low]
                if shift < half:
                    total[..., low] += same * mass[..., high]
        accepted = torch.where(draft > 0, torch.minimum(q, q / draft * target), 0.0)
        accepted[..., :half] = torch.minimum(p, q)[..., :half]
        return torch.empty_like(accepted).scatter_(-1, order, accepted)

    def resample(self, target_probs: Tensor, draft_probs: Tensor, relaxation: Tensor, token: Tensor) -> Tensor:
        """Law [B, V] after a rejection, whatever the token: the vanilla residual."""
        return residual(target_probs, draft_probs)


def close_pairs(embedding: Tensor, max_distance: float) -> Tensor:
    """embedding [V, H] -> bool [V, V], whose squared distance is below max_distance."""
    rows = embedding.detach().double()  # the expanded square loses half of the digits
    parts = rows.split(max(1, CHUNK // len(rows)))
    return torch.cat([torch.cdist(part, rows).square() < max_distance for part in parts])
