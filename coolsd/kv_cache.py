"""Static key-value cache whose rows have lengths of their own, and the masks that follow from it.

Knows slots and lengths; knows no transformer and no token. A row here is one (image, branch), R = B * G.

    slots   0 1 2 3 4 5 6      row 0 has 3 committed tokens, so the tree being scored sits at 3..5;
    row 0   a b c R x y .      R = last committed token, x and y its descendants.
    row 1   a b c d e R x      whatever stands behind a row's length is masked, and overwritten later.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def forced_mask(valid: Tensor, length: int) -> Tensor:
    """Causal mask without a cache: valid bool [R, P] of the prompt, `length` tokens behind -> bool [R, 1, N, N].

    A padded slot is seen by itself alone, else its softmax is empty.
    """
    nodes = valid.shape[1] + length
    seen = torch.ones(nodes, nodes, dtype=torch.bool, device=valid.device).tril()
    own = torch.eye(nodes, dtype=torch.bool, device=valid.device)
    return (seen & F.pad(valid, (0, length), value=True)[:, None] | own)[:, None]


class KVCache:
    """Keys and values of each layer: [R * slots, 2 * kv_heads, head_dim] (keys first, then values).

    A tensor a layer: a compiler writes in place into a whole tensor, and copies the whole for a part of it.
    valid: bool [R, P] or None, which of the first P slots may be attended (left padding may not, except by itself).
    `longest` is the host's upper bound of the rows' lengths: attention stops there, so the empty end costs nothing.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        valid: Tensor | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.rows, self.slots, self.kv_heads = rows, slots, kv_heads
        shape = (rows * slots, 2 * kv_heads, head_dim)
        self.stores = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.length = torch.zeros(rows, dtype=torch.long, device=device)
        self.longest = 0
        self.step = 32  # attention reads a multiple of this many slots; `slots` gives compiled code one shape
        self.first_slot = torch.arange(rows, device=device)[:, None] * slots
        self.key_slot = torch.arange(slots, device=device)
        self.valid: Tensor | None = None
        if valid is not None and not bool(valid.all()):  # one host sync per image
            self.valid = torch.ones(rows, slots, dtype=torch.bool, device=device)
            self.valid[:, : valid.shape[1]] = valid

    def place(self, nodes: int, ancestors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Where `nodes` new tokens per row go, and what each may see.

        ancestors: bool [N, M], or [R, N, M] where rows differ, [n, m] = new node n sees node m of the tree (itself
        included); None = causal. The new nodes are the last N of M; the others were placed before, not committed since.
        Returns flat slots [R * N] and an additive mask [R, 1, N, S], S = number of slots attention has to read.
        Raises ValueError where the cache has no room.
        """
        size = nodes if ancestors is None else ancestors.shape[-1]  # M
        if self.longest + size > self.slots:
            raise ValueError(f"{size} nodes behind {self.longest} tokens do not fit into {self.slots} cache slots")
        reach = min(self.slots, -(-(self.longest + size) // self.step) * self.step)
        offset = torch.arange(size - nodes, size, device=self.length.device)
        flat = (self.first_slot + self.length[:, None] + offset).view(-1)
        relative = self.key_slot[None, None, :reach] - self.length[:, None, None]  # [R, 1, S]; 0.. is the tree
        if ancestors is None:
            seen = relative <= offset[None, :, None]
        else:
            slot = relative.clamp(0, size - 1).expand(-1, nodes, -1)
            among = ancestors.expand(self.rows, -1, -1).gather(2, slot)  # [R, N, S]
            seen = (relative < 0) | among & (relative >= 0) & (relative < size)
        if self.valid is not None:
            seen = seen & (self.valid[:, None, :reach] | (relative == offset[None, :, None]))
        mask = torch.zeros(seen.shape, dtype=self.stores[0].dtype, device=seen.device).masked_fill_(~seen, -math.inf)
        return flat, mask[:, None]

    def write(self, layer: int, keys_values: Tensor, flat: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """keys_values [R, N, 2 * kv_heads, D] into the flat slots; returns keys and values [R, kv_heads, reach, D]."""
        store = self.stores[layer]
        store.index_copy_(0, flat, keys_values.reshape(-1, 2 * self.kv_heads, store.shape[-1]))
        view = store.view(self.rows, self.slots, 2, self.kv_heads, -1)[:, :reach].permute(2, 0, 3, 1, 4)
        return view[0], view[1]

    def keep(self, path: Tensor | None, count: Tensor, longest: int) -> None:
        """Commit the first count[r] (long [R]) nodes of path [R, K] and forget the others; None = nodes 0, 1, 2, ...

        longest: the caller's upper bound of the lengths afterwards. Behind a chain there is nothing to move.
        """
        if path is not None:
            base = self.first_slot + self.length[:, None]
            target = (base + torch.arange(path.shape[1], device=path.device)).view(-1)
            source = (base + path).view(-1)
            for store in self.stores:
                store.index_copy_(0, target, store.index_select(0, source))
        self.length = self.length + count
        self.longest = longest
