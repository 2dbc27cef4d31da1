"""Muon for matrices, AdamW for the rest, as one optimizer (Jordan et al. 2024; RMS matching: Liu et al. 2025).

torch.optim.Muon orthogonalises in bfloat16, which a CPU without AVX-512 BF16 emulates 8 times slower than float32,
and one matrix at a time; here equal shapes go through one batched product in float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw


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


class MuonAdamW(torch.optim.Optimizer):
    """matrices get lr * 0.2 * sqrt(max(rows, columns)) * orthogonalised momentum, others AdamW; one lr fits both."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], others: Iterable[nn.Parameter], lr: float, weight_decay: float
    ) -> None:
        groups = [{"params": list(matrices), "muon": True}, {"params": list(others), "muon": False}]
        super().__init__([g for g in groups if g["params"]], {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (self._muon if group["muon"] else self._adamw)(group)
        return loss

    def _muon(self, group: dict) -> None:
        shapes: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                shapes[parameter.shape].append(parameter)
        for shape, parameters in shapes.items():
            updates = []
            for parameter in parameters:
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.05)
                updates.append(torch.lerp(parameter.grad, momentum, 0.95))
            scale = 0.2 * max(shape) ** 0.5
            for parameter, update in zip(parameters, orthogonalize(torch.stack(updates)), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)

    def _adamw(self, group: dict) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state.update(
                    step=torch.zeros(()), exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter)
                )
        states = [self.state[p] for p in parameters]
        adamw(
            parameters, [p.grad for p in parameters], [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states],
            [], [s["step"] for s in states], amsgrad=False, beta1=0.9, beta2=0.95, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=1e-8, maximize=False,
        )  # fmt: skip
