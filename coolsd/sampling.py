"""From logits to probabilities to tokens. The only place that combines guidance branches; the only source of chance.

Knows tensors; knows no model, tree or rule. Everything random is a float in [0, 1) that is a pure function of
(seed, row, round, slot); every draw is an inverse CDF of such a float.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

UNIFORM_BITS = 24  # every float32 in [0, 1) of the form k / 2^24 is exact


@dataclass(frozen=True)
class Sampling:
    """How logits become a distribution, for target and draft alike.

    temperature >= 0 (0 = argmax), top_k >= 0 (0 = off; ties with the k-th logit stay), top_p in (0, 1] (the first
    token over the threshold stays), guidance >= 1 (classifier-free guidance scale; 1 = one branch only):
    logits = unconditional + guidance * (conditional - unconditional).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    guidance: float = 1.0

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature, math.isfinite(self.temperature) and self.temperature >= 0, ">= 0"),
            ("top_k", self.top_k, isinstance(self.top_k, int) and self.top_k >= 0, "an integer >= 0 (0 = off)"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1] (1 = off)"),
            ("guidance", self.guidance, math.isfinite(self.guidance) and self.guidance >= 1, ">= 1 (1 = off)"),
        )
        for name, value, fine, limit in checks:
            if not fine:
                raise ValueError(f"sampling {name} is {value}, but must be {limit}")

    @property
    def branches(self) -> int:
        return 1 if self.guidance == 1 else 2

    def guided(self, logits: Tensor) -> Tensor:
        """[B, G, N, V] -> float32 [B, N, V]: branches combined, divided by the temperature (by 1 where it is 0)."""
        if logits.shape[1] != self.branches:
            raise ValueError(
                f"guidance {self.guidance} needs {self.branches} branches, the logits have {logits.shape[1]}"
            )
        if self.guidance == 1:
            combined = logits[:, 0].float()
        else:
            conditional, unconditional = logits.float().unbind(1)
            combined = torch.lerp(unconditional, conditional, self.guidance)
        return combined if self.temperature < 1e-6 or self.temperature == 1 else combined / self.temperature

    def truncate(self, guided: Tensor) -> Tensor:
        """Guided logits [B, N, V] -> probabilities float32 [B, N, V] after top-k and top-p (or one-hot argmax)."""
        if self.temperature < 1e-6:
            return torch.zeros_like(guided).scatter_(-1, guided.argmax(-1, keepdim=True), 1.0)
        if 0 < self.top_k < guided.shape[-1]:
            kth = guided.topk(self.top_k, dim=-1).values[..., -1:]
            guided = guided.masked_fill(guided < kth, -math.inf)
        if self.top_p < 1:
            ordered, order = guided.sort(dim=-1, descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            ordered = ordered.masked_fill(before > self.top_p, -math.inf)
            guided = torch.empty_like(guided).scatter_(-1, order, ordered)
        return guided.softmax(-1)

    def probs(self, logits: Tensor) -> Tensor:
        """[B, G, N, V] logits -> the distribution tokens are drawn from, float32 [B, N, V]."""
        return self.truncate(self.guided(logits))


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF draw: probs [..., V] (need not sum to 1), uniforms [...] in [0, 1) -> long [...].

    Returns the first token whose cumulative mass exceeds uniform * total, hence never one without mass.
    """
    # CUDA's sum of one row takes its order as it comes: in float64 that does not reach the tokens
    cumulative = (probs.double() if probs.is_cuda else probs).cumsum(-1)
    threshold = (uniforms * cumulative[..., -1]).unsqueeze(-1)
    token = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp_(max=probs.shape[-1] - 1)
    if probs.is_cuda:  # a parallel sum may rise where there is no mass
        token = torch.where(probs.gather(-1, token[..., None]).squeeze(-1) > 0, token, probs.argmax(-1))
    return token


def mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64 (two's complement wrap-around; shifts made logical by a mask)."""
    x = x + (0x9E3779B97F4A7C15 - (1 << 64))
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * (0x94D049BB133111EB - (1 << 64))
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def counter_uniforms(seed: int, rows: Tensor, first_round: int, rounds: int, slots: int) -> Tensor:
    """Counter-based uniforms f(seed, row, round, slot): float32 [rounds, B, slots] in [0, 1).

    rows: long [B], global image indices. A row's numbers do not depend on the other rows, on B or on the device.
    """
    bits = counter_bits(seed, rows, first_round, rounds, slots) >> (64 - UNIFORM_BITS)
    return (bits & ((1 << UNIFORM_BITS) - 1)).float() / (1 << UNIFORM_BITS)


def counter_bits(seed: int, rows: Tensor, first_round: int, rounds: int, slots: int) -> Tensor:
    """The same as 64 random bits each, long [rounds, B, slots]."""
    device = rows.device
    key = mix(mix(torch.full((), seed, device=device)) ^ rows)[None, :, None]  # made there: a copy would wait
    key = mix(key ^ torch.arange(first_round, first_round + rounds, device=device)[:, None, None])
    return mix(key ^ torch.arange(slots, device=device))


def residual(target_probs: Tensor, accepted: Tensor) -> Tensor:
    """Distribution to resample from after a rejection: what the target still owes.  All [..., V].

    normalise(relu(target - accepted)).  Of all choices it minimises the total-variation distance to the target at
    this position (Theorem 2, Eqn. 5); where nothing is owed, the target itself is returned.
    """
    owed = (target_probs - accepted).relu()
    total = owed.sum(-1, keepdim=True)
    return torch.where(total > 0, owed / total.clamp(min=1e-38), target_probs)
