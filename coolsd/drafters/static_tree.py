"""A tree of one fixed shape, its children sampled from a draft head without replacement (EAGLE-1).

Knows shapes, the head and its cache; knows no rule and no target.

A path is the ranks of a node and of its ancestors among their siblings: (0, 2) is the third child of the first child.
Nodes with children come first, depth by depth, so those of one depth are a slice of the head's cache and draft_probs
has rows for them alone.

    0 -+- 1 -+- 2 --- 5     paths (0,) (0, 0) (1,) (0, 1) (0, 0, 0) are nodes 1 .. 5: 0, 1 and 2 have children.
       |     +- 4           The pair of node 0 is a pending one, those of 1 and 2 take two more passes of the head.
       +- 3
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from coolsd import tree as trees
from coolsd.drafters.chain import HeadDrafter
from coolsd.heads.eagle import EagleHead
from coolsd.interfaces import DraftTree
from coolsd.sampling import draw

# One digit per rank. EAGLE-1 and LANTERN publish them as mc_sim_7b_63 (25 nodes, not 63) and naive_extend_57.
SHAPES = {
    "eagle-25": "0 1 2 3  00 01 02 10 11 20 21 30  000 001 002 010 011 020 021 100  0000 0001 0002  00000 00001",
    "lantern-57": "0 1 2 3 4  00 01 02 03 10 11 12 20 21 22 30 31 40"
    "  000 001 002 003 010 011 012 020 021 022 030 031 100 101 110 200"
    "  0000 0001 0002 0003 0010 0011 0012 0020 0021 0030 0100 0101 0110 0200"
    "  00000 00001 00002 00010 00011 00100 00101 00110 00200",
}


class Level(NamedTuple):
    """Nodes first .. last - 1, all of one depth.

    above: place of each one's parent in the level above. draws: for each rank of child, (place, child) of the nodes
    that have one.
    """

    first: int
    last: int
    above: list[int]
    draws: list[list[tuple[int, int]]]


def ordered(paths: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The paths as tuples in the order of their nodes 1, 2, ...; raises ValueError where they are not a tree."""
    known = [tuple(path) for path in paths]
    if not known:
        raise ValueError("a tree of no paths drafts nothing; give at least [(0,)], or decode with drafter=None")
    for path in known:
        if not path or not all(isinstance(rank, int) and rank >= 0 for rank in path):
            raise ValueError(f"path {path} of a tree must be at least one rank >= 0; the root itself is not listed")
        if known.count(path) > 1:
            raise ValueError(f"path {path} of a tree is listed {known.count(path)} times; list every node once")
        for before in ((*path[:-1], path[-1] - 1), path[:-1]):  # the sibling before, the parent
            if before and min(before) >= 0 and before not in known:
                raise ValueError(f"path {path} of a tree needs {before}, which is missing; add it, or take {path} out")
    inner = {path[:-1] for path in known} - {()}

    def leads(path: tuple[int, ...]) -> bool:  # has children, or a later sibling that has
        return any(path[:-1] == other[:-1] and path[-1] <= other[-1] for other in inner)

    return sorted(known, key=lambda path: (not leads(path), len(path), path))


def parents(shape: str | Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The tree of a name in SHAPES or of a list of paths."""
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ValueError(f"no tree named {shape!r}; choose one of {', '.join(SHAPES)}, or give a list of paths")
        shape = [tuple(map(int, path)) for path in SHAPES[shape].split()]
    paths = [(), *ordered(shape)]
    number = {path: node for node, path in enumerate(paths)}
    return (-1, *(number[path[:-1]] for path in paths[1:]))


def levels(parent: tuple[int, ...]) -> list[Level]:
    depths = trees.node_depths(parent)
    found: list[Level] = []
    children = [[child for child, above in enumerate(parent) if above == node] for node in range(len(parent))]
    for _, group in groupby(range(max(parent) + 1), key=depths.__getitem__):
        nodes = list(group)
        above = [parent[node] - found[-1].first for node in nodes] if found else []
        most = max(len(children[node]) for node in nodes)
        draws = [
            [(place, children[node][rank]) for place, node in enumerate(nodes) if rank < len(children[node])]
            for rank in range(most)
        ]
        found.append(Level(nodes[0], nodes[-1] + 1, above, draws))
    return found


def without(left: Tensor, token: Tensor) -> Tensor:
    """Masses [B, N, V] less those of the tokens [B, N] that were drawn."""
    return left.scatter(-1, token[..., None], 0.0)


class StaticTree(HeadDrafter):
    """Draft the same tree every round. A child for which the draft has no mass left is absent, with all behind it:
    at temperature 0 all but one path.

    shape: "eagle-25", "lantern-57", or a list of paths as EAGLE and LANTERN configure them, in any order.
    """

    def __init__(self, head: EagleHead, shape: str | Sequence[Sequence[int]] = "eagle-25") -> None:
        self.shape = shape if isinstance(shape, str) else [list(path) for path in shape]
        self.parent = parents(shape)
        self.levels = levels(self.parent)
        slots = sum(drawn[-1][0] + 1 for level in self.levels for drawn in level.draws)
        is_chain = self.parent == trees.chain(len(self.parent) - 1)
        super().__init__(head, len(self.levels), len(self.parent), slots, self.levels[-1].last - 1, is_chain)

    def propose(self, uniforms: Tensor) -> DraftTree:
        hidden = self._read_pending()
        tokens = [self.root] * self.nodes  # [B, 1] each, filled node by node
        present = [torch.ones_like(self.root, dtype=torch.bool)] * self.nodes
        if self.pairs:
            inner = slice(1, self.pairs + 1)
            seen = None if self.is_chain else trees.ancestors(self.parent, hidden.device)[inner, inner]
            flat, mask = self.cache.place(self.pairs, seen)
            flat, (rope, context) = flat.view(-1, self.pairs), self._places(self.depth - 1)
        laws, slot = [], 0
        for depth, level in enumerate(self.levels):
            if depth:
                part, at = slice(level.first - 1, level.last - 1), slice(depth - 1, depth)
                own = range(level.first, level.last)
                read = [self.parent[node] for node in own] if self.lag else own
                pair = torch.cat([tokens[node] for node in read], 1).repeat_interleave(self.branches, 0)
                if level.above != list(range(hidden.shape[1])):
                    hidden = torch.cat([hidden[:, place : place + 1] for place in level.above], 1)
                extra = None if context is None else context[:, at]
                where = flat[:, part].reshape(-1)
                hidden = self.head(pair, hidden, rope[:, at], mask[:, :, part], self.cache, where, extra)
            left = self.sampling.probs(self._logits(hidden, depth))  # [B, N of this level, V]
            laws.append(left)
            alive = torch.cat(present[level.first : level.last], 1)
            for drawn in level.draws:
                reach = drawn[-1][0] + 1  # the nodes up to the last one with so many children draw
                left = left[:, :reach]
                token = draw(left, uniforms[:, slot : slot + reach])
                exists = alive[:, :reach] & (left.gather(-1, token[..., None]) > 0).squeeze(-1)
                for place, child in drawn:
                    tokens[child], present[child] = token[:, place : place + 1], exists[:, place : place + 1]
                left = without(left, token)
                slot += reach
        everywhere = None if self.is_chain else torch.cat(present, 1)
        return DraftTree(torch.cat(tokens, 1), self.parent, torch.cat(laws, 1), present=everywhere)
