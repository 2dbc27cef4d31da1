"""A window of drafts without a draft head: the target's own output of the previous call proposes the next one.

Knows the target's distributions and the width of its grid; knows no rule and no head. Speculative Jacobi decoding (SJD,
Teng et al. 2024, arXiv 2410.01699); with a coupling, speculative coupled decoding (SCD, arXiv 2510.24211).

    window     node n is the image token behind the root by n places; `emitted` = 3 moves every row by its own 3
    this call  R a b c d e          the output of node n is the distribution at node n + 1
    next call        R d'e'f'x x    d' e' f' drawn from the outputs at c, d, e; x = fresh, nothing is known there yet
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coolsd import tree as trees
from coolsd.interfaces import DraftTree, Prompt, TargetOutput, Verification
from coolsd.sampling import UNIFORM_BITS, Sampling, draw, mix

INITS = ("random", "repeat", "sample")
COUPLINGS = (None, "gumbel", "maximal")


def noise_keys(first: Tensor, second: Tensor) -> Tensor:
    """Two uniforms of any equal shape -> long keys of 2 * 24 bits for `gumbel_draw`."""
    high, low = ((uniforms * (1 << UNIFORM_BITS)).long() for uniforms in (first, second))
    return mix(mix(high) ^ low)


def gumbel_draw(probs: Tensor, keys: Tensor) -> Tensor:
    """argmax(log p + g): probs [..., V], keys long [...] -> long [...]. Never a token without mass.

    The noise is a function of (key, token), made here, so nobody stores [..., V] of it between calls. With
    g = -log E, E exponential, the argmax is that of p / E. E = -log(1 - u) has a relative precision of float32 near 0,
    where the winners are, so rare tokens of a large vocabulary get their share too.
    """
    bits = mix(keys[..., None] ^ torch.arange(probs.shape[-1], device=probs.device)) & ((1 << 63) - 1)
    uniforms = bits.float().mul_(2.0**-63).clamp_(2.0**-64, 1 - 2.0**-UNIFORM_BITS)
    return (probs / uniforms.neg_().log1p_().neg_()).argmax(-1)


def maximal_draw(probs: Tensor, previous_probs: Tensor, previous: Tensor, keep: Tensor, chance: Tensor) -> Tensor:
    """A sample of p that is the previous one, drawn from q, as often as that can be (1 - TV(p, q)).

    probs, previous_probs [..., V], previous long [...], uniforms keep and chance [...] -> long [...]. The old token d
    stays with probability min(1, p(d) / q(d)), else norm([p - q]_+) is drawn. q = 0 stands for no previous token.
    """
    old = previous_probs.gather(-1, previous[..., None]).squeeze(-1)
    stays = (keep * old < probs.gather(-1, previous[..., None]).squeeze(-1)) & (old > 0)
    owed = (probs - previous_probs).relu()
    owed = torch.where(owed.sum(-1, keepdim=True) > 0, owed, probs)
    return torch.where(stays, previous, draw(owed, chance))


class Jacobi:
    """Draft window - 1 tokens, each a sample of the target's distribution for its place in the previous call.

    init: where that call did not reach, the draft is `random` (uniform over the codebook), `repeat` (the token to its
    left in the grid) or `sample` (the likeliest token of its left neighbour's distribution); the first column is random
    in all three, and the reported draft distribution is one-hot. `repeat` and `sample` need a target with config.grid.

    coupling: None draws each window anew. A coupled draft tends to stay what it was, so the prefixes it is conditioned
    upon stay too, and are accepted for longer: `gumbel` fixes the noise of a place until it is settled, token =
    argmax(log p + g); `maximal` keeps the old token with probability min(1, p / q).

    Lossless under Vanilla with any init and coupling. Let H be all that was decided at the places before a place s in
    all calls so far: drafts, coupling noise, accept tests, residual draws. Target and window are causal, so H contains
    p and q of s, and whether s is tested now; a test settles s, for a failed one is followed by a residual draw. The
    noise g of s is no part of H, since no earlier place sees it, and s survives a call by what H says alone. So
    argmax(log q + g) has the law q given H, however many calls g has served. A maximal coupling has it by induction:
    its old draft had the law of the old q given H. A fresh draft may be any function of H and g, for its q is one-hot.
    The accept test and the residual draw use uniforms that no draft has seen (`generate` deals them apart), so the
    emitted token has the law p given H. Sharing g with either of them would bias it.
    """

    def __init__(self, window: int = 16, init: str = "random", coupling: str | None = None) -> None:
        if not isinstance(window, int) or window < 2:
            raise ValueError(f"Jacobi window is {window}, but must be an integer >= 2 (1 would be plain decoding)")
        if init not in INITS:
            raise ValueError(f"Jacobi init is {init!r}, but must be one of {', '.join(INITS)}")
        if coupling not in COUPLINGS:
            raise ValueError(f"Jacobi coupling is {coupling!r}, but must be None, 'gumbel' or 'maximal'")
        self.nodes, self.depth = window, window - 1
        self.slots = self.depth * (1 if coupling is None else 2)
        self.init, self.coupling = init, coupling
        self.parent = trees.chain(self.depth)

    def start(self, target: Any, prompt: Prompt, output: TargetOutput, token: Tensor, sampling: Sampling) -> None:
        self.sampling, self.layout = sampling, getattr(target, "layout", None)
        if self.init != "random":
            grid = getattr(getattr(target, "config", None), "grid", None)
            if grid is None:
                raise ValueError(f"Jacobi init {self.init!r} needs a target with a grid; use init='random'")
            self.columns = grid[1]
        self.node = torch.arange(self.nodes, device=token.device)
        self.root, self.count = token[:, None], torch.ones_like(token)
        probs = F.pad(sampling.probs(output.logits), (0, 0, self.depth, 0))  # [B, W, V], the first token's row last
        self.drafted = self.keys = token.new_zeros(len(token), self.depth)
        self.draft_probs = probs[:, 1:]
        self._advance(probs, torch.full_like(token, self.nodes))  # as behind a whole window: all drafts are fresh

    def _advance(self, probs: Tensor, emitted: Tensor) -> None:
        """Move the window of each row by its own emitted [B]; probs [B, W, V] = the output at each of its nodes."""
        node = self.node + emitted[:, None]  # [B, W]: node n of the next window was node n + emitted of this one
        before = node[:, 1:] - 1  # the same among the drafts, which have no root
        self.probs = _take(probs, node - 1)  # the root's own distribution first
        self.fresh = before > self.depth
        self.held = before < self.depth  # there was a draft at this place
        if self.coupling == "gumbel":
            self.keys = _take(self.keys, before)
        elif self.coupling == "maximal":
            self.drafted = _take(self.drafted, before)
            self.draft_probs = _take(self.draft_probs, before) * self.held[..., None]

    def propose(self, uniforms: Tensor) -> DraftTree:
        first, second = uniforms[:, : self.depth], uniforms[:, self.depth :]
        probs = self.probs[:, 1:]
        if self.coupling == "gumbel":
            self.keys = torch.where(self.held, self.keys, noise_keys(first, second))
            drafted = gumbel_draw(probs, self.keys)
        elif self.coupling == "maximal":
            drafted = maximal_draw(probs, self.draft_probs, self.drafted, first, second)
        else:
            drafted = draw(probs, first)
        drafted = torch.where(self.fresh, self._initial(drafted, first), drafted)
        certain = torch.zeros_like(probs).scatter_(-1, drafted[..., None], 1.0)
        self.drafted, self.draft_probs = drafted, torch.where(self.fresh[..., None], certain, probs)
        return DraftTree(torch.cat([self.root, drafted], 1), self.parent, self.draft_probs)

    def _initial(self, drafted: Tensor, uniforms: Tensor) -> Tensor:
        """Fresh drafts for all nodes, long [B, W - 1]; drafted holds what is drawn at the nodes that are not fresh."""
        codes = self.probs.shape[-1] if self.layout is None else self.layout.codes
        random = (uniforms * codes).long().clamp(max=codes - 1)
        if self.init == "random":
            return self._laid_out(random)
        # node      R  d  e  x  x | x  x      the bar: a row of the grid begins. A fresh draft copies the nearest anchor
        # anchor    R  d  e  e  e | x  x      to its left: one that is not fresh, or the random one of the first column
        fresh = F.pad(self.fresh, (1, 0))
        column = (self.count[:, None] - 1 + self.node) % self.columns
        anchor = torch.where(~fresh | (column == 0), self.node, 0).cummax(1).values
        known = self.probs.argmax(-1) if self.init == "sample" else torch.cat([self.root, drafted], 1)
        return self._laid_out(torch.where(fresh, F.pad(random, (1, 0)), known).gather(1, anchor)[:, 1:])

    def _laid_out(self, drafted: Tensor) -> Tensor:
        """The drafts [B, W - 1], or what the layout forces in their place."""
        if self.layout is None:
            return drafted
        forced = self.layout.at(self.count[:, None] - 1 + self.node)[:, 1:]
        return torch.where(forced < 0, drafted, forced)

    def observe(self, output: TargetOutput, verification: Verification, committed: int) -> None:
        emitted = verification.emitted
        self.count = self.count + emitted
        self.root = verification.tokens.gather(1, (emitted - 1).clamp(min=0)[:, None])
        self._advance(self.sampling.probs(output.logits), emitted)


def _take(window: Tensor, index: Tensor) -> Tensor:
    """window [B, K] or [B, K, V] at index [B, N], per row; an index outside 0 .. K - 1 takes the nearest."""
    index = index.clamp(0, window.shape[1] - 1)
    return window.gather(1, index if window.ndim == 2 else index[..., None].expand(-1, -1, window.shape[-1]))
