"""How much memory training a draft head takes, from its shapes, so that what cannot fit is refused before it starts.

Knows what autograd keeps of a step; knows no optimizer but Adam's two moments and no device.
"""

from __future__ import annotations

from coolsd.heads.eagle import EagleHead


def training_bytes(
    head: EagleHead, samples: int, branches: int, rollout: int, acceptance: bool, gradient_checkpointing: bool
) -> int:
    """Bytes of weights, gradients, moments and of what one step of `samples` keeps for its backward pass, in float32.

    Of each pair, at depth s (0-based), in floats: 13 H + 4 F a layer, the keys and values of s earlier depths, a row of
    the mask, and V for each distribution.  Measured by hooks on what autograd saves (tests/test_training.py).
    """
    shape, slots = head.config.transformer, head.config.prompt_slots
    size, wide, codes = shape.hidden_size, shape.intermediate_size, head.config.codebook_size
    images = branches * samples
    pairs, drafted = slots + head.config.image_tokens - 1, head.config.image_tokens
    kept = 0
    for depth in range(rollout):
        kept += images * pairs * (shape.layers * (12 * size + 4 * wide + 2 * depth * size) + size + (depth + 1) * pairs)
        if not gradient_checkpointing:
            kept += images * drafted * (size + codes) + samples * drafted * codes * acceptance
    kept += images * drafted * codes + samples * drafted * codes  # what the target says, the same at every depth
    passing = 2 * images * drafted * codes  # logits and their gradient, one depth at a time
    fixed = sum(buffer.numel() for buffer in head.buffers()) + 4 * sum(weight.numel() for weight in head.parameters())
    return 4 * (kept + passing + fixed)
