"""A tree of the most probable drafts, another one for every row and round (EAGLE-2, Li et al. 2024, arXiv 2406.16858).

Knows the head and its cache; knows no rule and no target. No host sync: all shapes are fixed, what varies is `parent`.

    expand   depth by depth, the `branch` most probable nodes go through the head, each gets its `branch` best tokens
    rerank   of all these candidates the most probable ones are kept; probable = by the product along the path
"""

from __future__ import annotations

import torch
from torch import Tensor

from coolsd.drafters.chain import HeadDrafter
from coolsd.heads.eagle import EagleHead
from coolsd.interfaces import DraftTree, Prompt, TargetOutput
from coolsd.sampling import Sampling


class DynamicTree(HeadDrafter):
    """Draft the tree that the head holds most probable. Its tokens are chosen, not sampled: `uniforms` go unread.

    nodes: of the tree, the root included. depth: of the deepest node there may be. branch: nodes expanded at each
    depth, and children of each. Ranks by probabilities before top-k and top-p, which would leave ties of zeros.
    """

    def __init__(self, head: EagleHead, nodes: int = 26, depth: int = 5, branch: int = 4) -> None:
        for name, value in (("branch", branch), ("depth", depth)):
            if value < 1:
                raise ValueError(f"DynamicTree {name} is {value}, but must be >= 1")
        most = 1 + branch + (depth - 1) * branch**2
        if not depth < nodes <= most:
            raise ValueError(
                f"DynamicTree nodes is {nodes}, but depth {depth} and branch {branch} make trees of "
                f"{depth + 1} to {most} nodes, the root included"
            )
        self.branch = branch
        super().__init__(head, depth, nodes, slots=0, pairs=(depth - 1) * branch, is_chain=branch == 1)

    def start(self, target: object, prompt: Prompt, output: TargetOutput, token: Tensor, sampling: Sampling) -> None:
        codes = self.head.config.codebook_size
        if self.branch > codes:
            raise ValueError(f"DynamicTree branch is {self.branch}, but must be at most {codes}, the codebook's size")
        super().start(target, prompt, output, token, sampling)

    def propose(self, uniforms: Tensor) -> DraftTree:
        hidden, batch, branch = self._read_pending(), len(uniforms), self.branch
        device = hidden.device
        rows = torch.arange(len(hidden), device=device)[:, None]
        images = torch.arange(batch, device=device)[:, None]
        rope, context = self._places(self.depth - 1)
        own = torch.eye(branch, dtype=torch.bool, device=device).expand(batch, -1, -1)
        seen = own[:, :, :0]  # [B, branch, pairs so far], which of them stand above each expanded node or are it
        # candidate 0 is the root, then come those of depth 1, 2, ...: a parent before its children
        number = torch.zeros(batch, 1, dtype=torch.long, device=device)  # of the expanded nodes
        joint = torch.zeros(batch, 1, device=device)  # their log probability
        drawn = self.root  # their tokens
        tokens, scores, parents, count = [], [], [], 1
        for depth in range(self.depth):
            law = self.sampling.guided(self._logits(hidden, depth)).log_softmax(-1)
            best = law.topk(branch, dim=-1)
            # at most 0, or rounding would put a child before its parent
            score = (joint[..., None] + best.values.clamp(max=0)).flatten(1)  # [B, expanded * branch]
            token = best.indices.flatten(1)
            tokens.append(token)
            scores.append(score)
            parents.append(number.repeat_interleave(branch, 1))
            if depth + 1 == self.depth:
                break
            joint, going = score.topk(branch, dim=-1)
            number, above = count + going, going // branch
            count += score.shape[1]
            seen = torch.cat([seen[images, above], own], -1)
            flat, mask = self.cache.place(branch, seen.repeat_interleave(self.branches, 0))
            parents_drawn, drawn = drawn.gather(1, above), token.gather(1, going)
            pair = (parents_drawn if self.lag else drawn).repeat_interleave(self.branches, 0)
            before = hidden[rows, above.repeat_interleave(self.branches, 0)]
            at = slice(depth, depth + 1)
            extra = None if context is None else context[:, at]
            hidden = self.head(pair, before, rope[:, at], mask, self.cache, flat, extra)
        # Closed: a parent is as probable as its child or more, and comes first among equals (stable).
        kept = torch.cat(scores, 1).sort(dim=-1, descending=True, stable=True).indices[:, : self.nodes - 1]
        place = torch.zeros(batch, count + score.shape[1], dtype=torch.long, device=device)
        place.scatter_(1, kept + 1, torch.arange(1, self.nodes, device=device).expand(batch, -1))
        parent = place.gather(1, torch.cat(parents, 1).gather(1, kept))
        return DraftTree(
            tokens=torch.cat([self.root, torch.cat(tokens, 1).gather(1, kept)], 1),
            parent=torch.cat([torch.full_like(self.root, -1), parent], 1),
            draft_probs=law.new_empty(batch, 0, law.shape[-1]),
            chosen=True,
            depth=self.depth,
            width=min(branch, self.nodes - 1),
        )
