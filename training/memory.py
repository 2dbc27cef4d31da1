"""How much memory training a draft head takes, from its shapes, so that what cannot fit is refused before it starts.

Knows what autograd keeps of a step; knows no optimizer but Adam's two moments and no device.
"""

from __future__ import annotations

from coolsd.heads.eagle import EagleHead


def training_bytes(
    head: EagleHead,
    samples: int,
    branches: int,
    rollout: int = 1,
    acceptance: bool = False,
    gradient_checkpointing: bool = False,
    width: int = 4,
) -> int:
    """Bytes of gradients and moments and of what one step of `samples` keeps for its backward pass; of the weights not,
    which are there before. width: bytes of a state, 2 under mixed precision; distributions are float32 always.

    Of each pair, at depth s (0-based), in numbers: 12 H + 4 F a layer, in each the keys and values of s earlier depths
    and a row of the mask; one H more, and V for each distribution.
    """
    shape, slots = head.config.transformer, head.config.prompt_slots
    size, wide, codes = shape.hidden_size, shape.intermediate_size, head.config.codebook_size
    images, pairs, drafted = branches * samples, slots + head.config.image_tokens - 1, head.config.image_tokens
    states, distributions = images * pairs * len(head.config.layers) * size, 0
    for depth in range(rollout):
        layer = 12 * size + 4 * wide + 2 * depth * size + (depth + 1) * pairs
        states += images * pairs * (shape.layers * layer + size)
        if not gradient_checkpointing:
            states += images * drafted * size
            distributions += (images + samples * acceptance) * drafted * codes
    distributions += (images + samples) * drafted * codes  # what the target says, the same at every depth
    passing = 2 * images * drafted * codes  # logits and their gradient, one depth at a time
    fixed = 3 * sum(weight.numel() for weight in head.parameters())
    return width * states + 4 * (distributions + passing + fixed)
