"""A draft head on its own predictions, depth after depth, all positions of a row at once and with gradients.

Knows masks and keys; knows no loss. As decoding drafts a chain (compare `coolsd.drafters.chain`), with the true tokens:

    depth s reads at pair j   (token j + 1, what depth s - 1 predicted for hidden state j); depth 0 the target's own
    and attends               depth 0 at pairs .. j - s, which are committed, then depth m at pair j - s + m, its branch

                keys of depth 0     of depth 1
    s = 0       0 1 2 . j
    s = 1       0 1 2 j-1           j                 (HASS, 2408.15766; EAGLE-3's training-time test, 2503.01840)
"""

from __future__ import annotations

import torch
from torch import Tensor


class RolloutCache:
    """The keys and values of all depths so far, one behind another; in the place of a `KVCache`, but with gradients."""

    def __init__(self, layers: int) -> None:
        self.kept: list[list[Tensor]] = [[] for _ in range(layers)]

    def write(self, layer: int, keys_values: Tensor, flat: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """keys_values [R, N, 2 * kv_heads, D] -> keys and values [R, kv_heads, (depths so far) N, D]."""
        self.kept[layer].append(keys_values)
        keys, values = torch.cat(self.kept[layer], 1).unflatten(2, (2, -1)).permute(2, 0, 3, 1, 4)
        return keys, values


def depth_mask(seen: Tensor, depth: int) -> Tensor:
    """What the pairs of a depth may attend: seen bool [R, N] (no padding) -> bool [R, 1, N, (depth + 1) N]."""
    pairs = seen.shape[1]
    position = torch.arange(pairs, device=seen.device)
    behind = position[:, None] - position  # [N, N], query - key
    committed = (behind >= depth) & seen[:, None]
    if depth == 0:
        committed = committed | (behind == 0)  # padding attends itself, else its softmax is empty
        return committed[:, None]
    branch = [(behind == depth - m).expand(len(seen), -1, -1) for m in range(1, depth + 1)]
    return torch.cat([committed, *branch], -1)[:, None]


def shifted(predicted: Tensor, hidden: Tensor) -> Tensor:
    """Input hidden states of the next depth, [R, N, H]: at pair j the prediction of pair j - 1; none at pair 0."""
    return torch.cat([hidden[:, :1], predicted[:, :-1]], 1)


def shifted_mask(trained: Tensor, depth: int) -> Tensor:
    """bool [R, N]: the pair has a loss at this depth: it and the pair where its chain began, `depth` earlier, do."""
    moved = torch.zeros_like(trained)
    moved[:, depth:] = trained[:, : trained.shape[1] - depth]
    return trained & moved
