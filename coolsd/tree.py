"""Shapes of draft trees: depths, ancestors, children. Knows integers only.

A tree is a tuple of parents: parent[0] = -1, every parent stands before its children; what follows from one is cached.
Where every row has its own tree, parents are a long [B, N] and so much is computed anew, without a host sync.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def chain(length: int) -> tuple[int, ...]:
    """The tree in which every node has one child: length drafted tokens behind the root."""
    return tuple(range(-1, length))


@lru_cache(maxsize=64)
def node_depths(parent: tuple[int, ...]) -> tuple[int, ...]:
    depths: list[int] = []
    for node, above in enumerate(parent):
        if not (-1 <= above < node) or (above == -1) != (node == 0):
            raise ValueError(f"node {node} of a draft tree has parent {above}; parents stand before their children")
        depths.append(0 if above < 0 else depths[above] + 1)
    return tuple(depths)


@lru_cache(maxsize=64)
def depths(parent: tuple[int, ...], device: torch.device) -> Tensor:
    """long [N], 0 for the root."""
    return torch.tensor(node_depths(parent), device=device)


def ancestors(parent: tuple[int, ...] | Tensor, device: torch.device, depth: int = 0) -> Tensor:
    """bool [N, N] or [B, N, N], [n, m] = node m is n or above n. depth: that of the deepest node, if known."""
    if isinstance(parent, tuple):
        return _ancestors(parent, device)
    nodes = parent.shape[1]
    above = parent.clamp(min=0)[:, :, None].expand(-1, -1, nodes)
    seen = own = torch.eye(nodes, dtype=torch.bool, device=device).expand(len(parent), -1, -1)
    for _ in range(depth or nodes - 1):  # each turn looks one node further up
        seen = own | seen.gather(1, above)
    return seen


def children(parent: tuple[int, ...] | Tensor, device: torch.device, width: int = 0) -> Tensor:
    """long [N, C] or [B, N, C], the children of each node in test order, -1 behind the last one (C = width >= 1)."""
    if isinstance(parent, tuple):
        return _children(parent, device)
    batch, nodes = parent.shape
    same = (parent[:, :, None] == parent[:, None, :]) & (parent[:, :, None] >= 0)
    rank = (same & torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril(-1)).sum(-1)  # among its siblings
    table = torch.full((batch, nodes * width), -1, device=device)
    node = torch.arange(nodes, device=device).expand(batch, -1)
    table.scatter_(1, (parent * width + rank)[:, 1:], node[:, 1:])
    return table.view(batch, nodes, width)


@lru_cache(maxsize=64)
def width(parent: tuple[int, ...]) -> int:
    """Most children of a node, at least 1."""
    return max(1, *map(parent[1:].count, range(len(parent))))


@lru_cache(maxsize=64)
def widths(parent: tuple[int, ...]) -> tuple[int, ...]:
    """Most children of a node at each depth 0 .. L - 1."""
    level = node_depths(parent)
    most = [0] * max(level)
    for node, depth in enumerate(level):
        if depth < len(most):
            most[depth] = max(most[depth], parent.count(node))
    return tuple(most)


@lru_cache(maxsize=64)
def _ancestors(parent: tuple[int, ...], device: torch.device) -> Tensor:
    seen = torch.eye(len(parent), dtype=torch.bool)
    for node, above in enumerate(parent):
        if above >= 0:
            seen[node] |= seen[above]
    return seen.to(device)


@lru_cache(maxsize=64)
def _children(parent: tuple[int, ...], device: torch.device) -> Tensor:
    lists: list[list[int]] = [[] for _ in parent]
    for node, above in enumerate(parent[1:], start=1):
        lists[above].append(node)
    most = width(parent)
    return torch.tensor([row + [-1] * (most - len(row)) for row in lists], device=device)
