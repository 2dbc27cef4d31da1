"""Which token a published head was trained to read beside a hidden state: its file does not say, its target does.

Knows a head and a target's interface; knows no file.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coolsd.heads.eagle import PAIRINGS, EagleHead
from coolsd.interfaces import DraftTree
from coolsd.sampling import Sampling, counter_uniforms, draw

CAPTION = "a photo of a red apple on a wooden table"


@torch.no_grad()
def agreement(head: EagleHead, target: Any, caption: str = CAPTION, count: int = 64) -> dict[str, float]:
    """Pairing -> how well the head drafts with it: the mean of sum min(p, q) over the first tokens of one image.

    The target draws `count` tokens, or all of a smaller image, without guidance; p is its distribution and q the head's
    behind the target's own states. Places that the layout forces are left out.
    """
    count = min(count, target.image_tokens)
    prompt = target.encode([caption], False)
    slots, sampling = prompt.mask.shape[-1], Sampling()
    uniforms = counter_uniforms(0, torch.zeros(1, dtype=torch.long), 0, count, 1)[..., 0].to(target.device)
    output, cache = target.prefill(prompt, 1)
    drawn: list[Tensor] = []
    for step in range(count):
        drawn.append(draw(sampling.probs(output.logits)[:, 0], uniforms[step])[:, None])
        output = target.score(DraftTree(drawn[-1], (-1,), uniforms.new_empty(1, 0, 0)), prompt, cache)
        cache.keep(None, torch.ones_like(cache.length), slots + step + 1)
    tokens = torch.cat(drawn, 1)
    output = target.forced(prompt, tokens)
    hidden = output.hidden_states[:, 0, :-1]
    words = torch.full_like(prompt.mask[:, 0], -1, dtype=torch.long)
    if head.config.text:
        words = head.config.codebook_size + prompt.inputs["ids"][:, 0]
    whole = torch.cat([words, tokens], 1)
    read = {"next": whole[:, 1:], "same": whole[:, :-1]}
    length = hidden.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()
    if head.config.mask_prefix_pads:
        own = torch.eye(length, dtype=torch.bool, device=hidden.device)
        mask = mask & F.pad(prompt.mask[0, 0], (0, length - slots), value=True) | own
    free = torch.ones(count - 1, dtype=torch.bool, device=hidden.device)
    if target.layout is not None:
        free = target.layout.forced[1:count] < 0
    wanted = sampling.probs(output.logits)[0, 1:][free]
    found = {}
    for pairing in PAIRINGS:
        # pair i gives state i + 1, hence token i + 2: the first one of an image that is not the root comes of slots - 1
        predicted = head(read[pairing], hidden, head.rope[None, 1 : length + 1], mask[None, None])[:, slots - 1 : -1]
        drafted = sampling.probs(head.logits(predicted)[:, None])[0, : count - 1][free]
        found[pairing] = round(float(torch.minimum(wanted, drafted).sum(-1).mean()), 4)
    return found
