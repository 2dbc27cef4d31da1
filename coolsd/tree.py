"""Shapes of draft trees: depths, ancestors, children. Knows integers only.

A tree is a tuple of parents: parent[0] = -1, every parent stands before its children. All functions are cached.
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


@lru_cache(maxsize=64)
def ancestors(parent: tuple[int, ...], device: torch.device) -> Tensor:
    """bool [N, N], [n, m] = node m is n or above n."""
    seen = torch.eye(len(parent), dtype=torch.bool)
    for node, above in enumerate(parent):
        if above >= 0:
            seen[node] |= seen[above]
    return seen.to(device)


@lru_cache(maxsize=64)
def children(parent: tuple[int, ...], device: torch.device) -> Tensor:
    """long [N, C], the children of each node in test order, -1 behind the last one (C >= 1)."""
    lists: list[list[int]] = [[] for _ in parent]
    for node, above in enumerate(parent[1:], start=1):
        lists[above].append(node)
    width = max(1, max(map(len, lists)))
    return torch.tensor([row + [-1] * (width - len(row)) for row in lists], device=device)
