"""A chain of L tokens from a draft head, and what all drafters with a head share: its cache and its pending pairs.

Knows the head and its cache; knows no rule and no target.

round   pending pairs (committed tokens with the target's own hidden states) go through the head in one pass,
        the last output gives the drafts behind the root; each further draft feeds the head its own output.
cache   pair 0 1 2 ... n | n+1 .. n+K : the K drafted pairs behind the committed ones are overwritten next round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coolsd import tree as trees
from coolsd.heads.eagle import EagleHead
from coolsd.interfaces import DraftTree, Layout, Prompt, TargetOutput, Verification
from coolsd.sampling import Sampling, draw


class HeadDrafter:
    """Keeps the head's cache in step with what is committed; `propose` is left to those who inherit.

    depth, nodes, slots: as in `coolsd.interfaces.Drafter`. pairs: K, drafted pairs that go through the head a round.
    is_chain: its trees are always chains.
    """

    def __init__(self, head: EagleHead, depth: int, nodes: int, slots: int, pairs: int, is_chain: bool) -> None:
        self.head, self.depth, self.nodes, self.slots, self.pairs = head, depth, nodes, slots, pairs
        self.is_chain = is_chain

    def start(self, target: object, prompt: Prompt, output: TargetOutput, token: Tensor, sampling: Sampling) -> None:
        slots = prompt.mask.shape[-1]
        self.sampling, self.branches, self.slots_before = sampling, prompt.branches, slots
        self.layout: Layout | None = getattr(target, "layout", None)
        self.lag = int(self.head.config.pairing == "same")  # places that the tokens of pairs stand further back
        valid = prompt.mask.flatten(0, 1) if self.head.config.mask_prefix_pads else None
        room = slots + self.head.config.image_tokens + self.depth + 1 + self.pairs
        self.cache = self.head.transformer.new_cache(len(token) * self.branches, room, valid)
        self.context: Tensor | None = None
        if self.head.config.context:
            if "context" not in prompt.inputs:
                raise ValueError("the head was trained with a caption context, which this target does not give")
            self.context = self.head.shifted(prompt.inputs["context"].flatten(0, 1))
        tokens = torch.full((len(token), slots), -1, device=token.device)
        tokens[:, -1] = token
        self.root = tokens[:, :1]
        self._pend(tokens, self.head.features(output), torch.full_like(token, slots), slots)
        if self.head.config.text:  # the head knows captions by their tokens, in rows behind those of the codebook
            words = self.head.config.codebook_size + prompt.inputs["ids"].flatten(0, 1)
            self.pending[0][:, : slots if self.lag else -1] = words if self.lag else words[:, 1:]

    def _pend(self, tokens: Tensor, hidden_states: Tensor, count: Tensor, longest: int) -> None:
        """tokens [B, K] with the hidden states before them [B, G, K, H]; the first count[b] are real."""
        read = torch.cat([self.root, tokens[:, :-1]], 1) if self.lag else tokens
        self.root = tokens.gather(1, (count - 1).clamp(min=0)[:, None])
        self.pending = read.repeat_interleave(self.branches, 0), hidden_states.flatten(0, 1)
        self.count = count.repeat_interleave(self.branches)
        self.longest = longest

    def _read_pending(self) -> Tensor:
        """The head's output behind the root, [R, 1, H]."""
        tokens, hidden = self.pending
        flat, mask = self.cache.place(tokens.shape[1])
        rope, context = self._places(tokens.shape[1])
        hidden = self.head(tokens, hidden, rope, mask, self.cache, flat, context)
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        self.cache.keep(None, self.count, self.longest)
        return hidden[rows, self.count - 1][:, None]

    def _logits(self, hidden: Tensor, depth: int) -> Tensor:
        """[R, N, H] at nodes of one depth -> [B, G, N, V], what they draft one deeper, within the target's layout."""
        logits = self.head.logits(hidden).unflatten(0, (-1, self.branches))
        if self.layout is None:
            return logits
        behind = self.cache.length[:: self.branches, None] - self.slots_before + 1  # image tokens up to the root
        return self.layout.constrain(logits, behind + depth)

    def _places(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Rotary rows and context of the tokens of the next `count` pairs, or of `count` depths of a tree of pairs."""
        position = self.cache.length[:, None] + torch.arange(1, count + 1, device=self.cache.length.device)  # [R, N]
        rope = self.head.rope[position.clamp(max=self.head.rope.shape[0] - 1)]
        if self.context is None:
            return rope, None
        token = (position - self.slots_before + 1).clamp(0, self.context.shape[1] - 1)
        return rope, self.context[torch.arange(len(token), device=token.device)[:, None], token]

    def observe(self, output: TargetOutput, verification: Verification, committed: int) -> None:
        hidden = self.head.features(output)
        if not self.is_chain:
            along = verification.path[:, None, :, None].expand(-1, self.branches, -1, hidden.shape[-1])
            hidden = hidden.gather(2, along)
        self._pend(verification.tokens, hidden, verification.emitted, self.slots_before + committed - 1)


class Chain(HeadDrafter):
    """Draft `length` tokens one after another, each sampled from the head under the target's own Sampling."""

    def __init__(self, head: EagleHead, length: int = 5) -> None:
        if length < 1:
            raise ValueError(f"Chain length is {length}, but must be >= 1")
        super().__init__(head, depth=length, nodes=length + 1, slots=length, pairs=length - 1, is_chain=True)
        self.parent = trees.chain(length)

    def propose(self, uniforms: Tensor) -> DraftTree:
        hidden = self._read_pending()
        drafted, probs = [self.root], []
        if self.pairs:
            flat, mask = self.cache.place(self.pairs)
            flat, (rope, context) = flat.view(-1, self.pairs), self._places(self.pairs)
        for step in range(self.depth):
            draft = self.sampling.probs(self._logits(hidden, step))  # [B, 1, V]
            token = draw(draft, uniforms[:, step : step + 1])
            drafted.append(token)
            probs.append(draft)
            if step < self.pairs:
                pair = drafted[step + 1 - self.lag].repeat_interleave(self.branches, 0)
                at = slice(step, step + 1)
                seen = None if context is None else context[:, at]
                hidden = self.head(pair, hidden, rope[:, at], mask[:, :, at], self.cache, flat[:, step], seen)
        return DraftTree(torch.cat(drafted, 1), self.parent, torch.cat(probs, 1))
