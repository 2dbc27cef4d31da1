"""Losses and measures of a draft head. Softmax and sums in float32 under any precision: in bfloat16 the gradient of a
nearly right draft is noise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def soft_cross_entropy(draft_logits: Tensor, target_probs: Tensor) -> Tensor:
    """- sum p log_softmax(draft), nats: [..., V] -> [...]."""
    return -(target_probs * draft_logits.float().log_softmax(-1)).sum(-1)


def feature_loss(draft_hidden: Tensor, target_hidden: Tensor) -> Tensor:
    """EAGLE's regression: SmoothL1 (beta 1), mean over the hidden size: [..., H] -> [...]."""
    return F.smooth_l1_loss(draft_hidden.float(), target_hidden.float(), reduction="none").mean(-1)


def acceptance_mass(draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """sum min(p, q): the probability that vanilla verification accepts one drafted token, [..., V] -> [...]."""
    return torch.minimum(draft_probs, target_probs).sum(-1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the places where mask (bool, same shape) is True."""
    return (values * mask).sum() / mask.sum().clamp(min=1)
