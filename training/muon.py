"""Muon for matrices, AdamW for the rest, as one optimizer (Jordan et al. 2024; RMS matching: Liu et al. 2025).

torch.optim.Muon orthogonalises in bfloat16, which a CPU without AVX-512 BF16 emulates 8 times slower than float32,
and one matrix at a time; here equal shapes go through one batched product in float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards U V^T of each matrix [K, rows, columns]; singular values end near 0.7..1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.AdamW):
    """AdamW; in a group whose `muon` is not 0 weights take lr * muon * sqrt(max(rows, columns)) * the orthogonalised
    momentum instead (0.2: one lr fits both). Convolutions count as [out, in * kh * kw]."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for weight in group["params"] if group["muon"] else []:
                if weight.grad is not None:
                    shapes[weight.flatten(1).shape].append(weight)
            for shape, weights in shapes.items():
                updates = []
                for weight in weights:
                    state = self.state[weight]
                    if not state:  # AdamW's own loading asks every state for its step
                        state.update({"step": torch.zeros(()), "momentum": torch.zeros_like(weight)})
                    state["momentum"].lerp_(weight.grad, 0.05)
                    updates.append(weight.grad.lerp(state["momentum"], 0.95).flatten(1))
                scale = group["lr"] * group["muon"] * max(shape) ** 0.5
                for weight, update in zip(weights, orthogonalize(torch.stack(updates)), strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update.view_as(weight), alpha=-scale)
                    weight.grad = None  # AdamW skips what has no gradient
        super().step()
        return loss
