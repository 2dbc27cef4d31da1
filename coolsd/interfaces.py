"""The words everybody speaks: prompts, target outputs, draft trees, verifications, results.

Knows shapes; knows no model, no rule, no drafter. Letters in shapes are fixed everywhere:
B images in the batch, G guidance branches (1, or 2 = conditional then unconditional), N nodes or
positions, V codebook size, H hidden size, P prompt slots, T image tokens, L draft depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from coolsd import tree as trees


@dataclass(frozen=True)
class Prompt:
    """B captions, encoded for one target.

    captions: B strings. mask: bool [B, G, P], True where the prompt slot holds something (left-padded).
    inputs: what the target's own `prefill` wants, each tensor [B, G, ...]. context [B, G, T + 1, H], where a target has
    one, is public: row n is added to the embedding of the input that predicts token n, and a draft head gets it too.
    """

    captions: tuple[str, ...]
    mask: Tensor
    inputs: dict[str, Tensor]

    @property
    def branches(self) -> int:
        return self.mask.shape[1]

    def choose(self, branch: Tensor) -> Prompt:
        """One branch of each row: branch long [B] (0 = caption, 1 = null caption) -> prompt with G = 1."""
        rows = torch.arange(len(branch), device=branch.device)
        inputs = {name: value[rows, branch][:, None] for name, value in self.inputs.items()}
        return Prompt(self.captions, self.mask[rows, branch][:, None], inputs)


@dataclass(frozen=True)
class Layout:
    """Tokens of an image that nobody draws, such as ends of lines.

    forced: long [T], the token that must stand at each place of the image, or -1 where one of the first `codes` tokens
    of the codebook is drawn; the others occur only where they are forced.
    """

    forced: Tensor
    codes: int

    def at(self, place: Tensor) -> Tensor:
        """The forced token or -1 at places long [...] of the image; behind its end nothing is forced."""
        last = len(self.forced) - 1
        return torch.where(place <= last, self.forced[place.clamp(max=last)], -1)

    def constrain(self, logits: Tensor, place: Tensor) -> Tensor:
        """logits [B, G, N, V] of the tokens at places [B or 1, N or 1] -> those that cannot stand there get the lowest
        number of the dtype: no mass, and unlike -inf guidance may combine two of them."""
        forced, token = self.at(place)[..., None], torch.arange(logits.shape[-1], device=logits.device)
        allowed = torch.where(forced < 0, token < self.codes, token == forced)
        return logits.masked_fill(~allowed[:, None], torch.finfo(logits.dtype).min)


@dataclass(frozen=True)
class TargetOutput:
    """logits [B, G, N, V] in the target's dtype; hidden_states [B, G, N, H] after the target's final norm.

    Logits are constrained where the target has a layout (`Layout.constrain`), hidden states never are.
    layers: by number (1 = the first) what came out of the transformer layers that `TargetModel.layers` names,
    [B, G, N, H] each.
    """

    logits: Tensor
    hidden_states: Tensor
    layers: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens as a tree whose node 0 is the last committed token.

    tokens: long [B, N]. parent: N integers, parent[0] = -1, parents stand before children, siblings in test order; or
    long [B, N] where rows differ, and then depth (of the deepest node) and width (most children of a node) are given.
    draft_probs: float32 [B, I, V], row i = the distribution from which the children of node i were drawn
    (I = 1 + the last node that has children; without replacement among siblings).
    chosen: the children are the draft's top tokens instead of samples; draft_probs is not read, its V aside. present:
    bool [B, N] or None (= all); an absent node is never tested, and behind an absent sibling all later ones are absent.
    forced: long [B, L], the token that the layout forces at each depth, or -1; None = no layout. `generate` adds it.
    A chain is the tree with parent (-1, 0, 1, ...).
    """

    tokens: Tensor
    parent: tuple[int, ...] | Tensor
    draft_probs: Tensor
    chosen: bool = False
    present: Tensor | None = None
    depth: int = 0
    width: int = 0
    forced: Tensor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.parent, tuple):
            object.__setattr__(self, "depth", max(trees.node_depths(self.parent)))
            object.__setattr__(self, "width", trees.width(self.parent))

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        return isinstance(self.parent, tuple) and self.parent == tuple(range(-1, len(self.parent) - 1))

    def places(self, branches: int) -> tuple[Tensor | None, Tensor]:
        """Ancestors as `KVCache.place` wants them, of R = B * branches rows, and depths long [N] or [R, N]."""
        device = self.tokens.device
        if isinstance(self.parent, tuple):
            return None if self.is_chain else trees.ancestors(self.parent, device), trees.depths(self.parent, device)
        ancestors = trees.ancestors(self.parent, device, self.depth).repeat_interleave(branches, 0)
        return ancestors, ancestors.sum(-1) - 1


@dataclass(frozen=True)
class Verification:
    """What one target call decided, for each row.

    tokens: long [B, L+1], the emitted tokens: accepted drafts, then one from the target or a residual; behind
    `emitted` any valid token. path: long [B, L+1], path[:, j] = the node whose distribution token j was tested against
    (path[:, 0] = 0, then the accepted nodes). emitted: long [B] in 0..L+1.
    bias, kl: float32 [B, L], certificates summed over the executed tests at each depth (THEORY.md section 4), or None;
    kl is None for trees, unless nothing is relaxed.
    """

    tokens: Tensor
    path: Tensor
    emitted: Tensor
    bias: Tensor | None = None
    kl: Tensor | None = None


@dataclass(frozen=True)
class Round:
    """What an observer of `generate` sees after each target call; tensors are those of the loop, do not write to them.

    target_probs: float32 [B, N, V], processed. active: bool [B], rows whose image is not finished yet.
    """

    tree: DraftTree
    target_probs: Tensor
    verification: Verification
    active: Tensor


@dataclass
class DecodeResult:
    """What `generate` returns; see its docstring for shapes and units."""

    tokens: Tensor
    images: Tensor | None
    accepted_length: Tensor
    target_calls: Tensor
    emitted: Tensor
    bias_per_token: Tensor | None
    kl_per_token: Tensor | None
    nll_per_token: Tensor
    seconds: dict[str, float] = field(default_factory=dict)
    accepted_length_unforced: Tensor | None = None


class Cache(Protocol):
    """Keys and values of the committed tokens of every (row, branch), plus those of the tree being scored."""

    def keep(self, path: Tensor | None, count: Tensor, longest: int) -> None:
        """Commit the first count[r] nodes of path [R, K] (None = nodes 0, 1, 2, ...) and forget the other nodes."""


class TargetModel(Protocol):
    """An autoregressive image model, an nn.Module. Stateless but for the cache it hands out.

    A folder's config.json tells its "architecture", and for the estimate of memory "transformer" (`TransformerConfig`),
    "prompt_slots", "grid" and "codebook_size". Compiled, its `transformer` is asked to `compile_shapes()`.
    """

    image_tokens: int  # T, tokens of one image, those that a layout forces included
    codebook_size: int  # V
    layout: Layout | None  # None: every token is drawn
    hidden_size: int  # H
    layers: tuple[int, ...]  # transformer layers to show in every output, numbered from 1; none unless asked for
    layer_count: int
    fingerprint: str
    device: torch.device
    dtype: torch.dtype
    image_tokenizer: Any  # None where none was found beside the checkpoint

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> TargetModel:
        """From a checkpoint folder and its config.json; `load_target` then sets fingerprint, device, dtype and
        image_tokenizer."""

    folder: Path | None  # where it was loaded from

    def codebook(self) -> Tensor:
        """The image tokenizer's code vectors as stored, [V, D]."""

    def ends(self) -> dict[str, Tensor]:
        """What a draft head shares: embedding [V, H], norm [H], lm_head [V, H], rope [P + T (+ spare), D / 2, 2]."""

    def problem(self, caption: str) -> str | None:
        """Why `encode` would refuse this caption, in few words; None where it would not."""

    def encode(self, captions: Sequence[str], guidance: bool) -> Prompt: ...

    def prefill(self, prompt: Prompt, tree_slots: int) -> tuple[TargetOutput, Cache]:
        """Output at all P prompt slots (logits of the last one only: [B, G, 1, V]) and a cache with room
        for T tokens and a tree of tree_slots nodes."""

    def score(self, tree: DraftTree, prompt: Prompt, cache: Any) -> TargetOutput:
        """Output at every node of the tree, written behind the committed tokens of the cache."""

    def forced(self, prompt: Prompt, tokens: Tensor) -> TargetOutput:
        """Teacher-forced pass over tokens [B, T]: hidden_states [B, G, P+T, H], logits [B, G, T, V] (logits[..., n, :]
        is the distribution of token n). What decoding would see, in one pass; used by training and extraction."""

    def encode_images(self, images: Tensor) -> Tensor:
        """uint8 [B, 3, h, w] -> tokens [B, T]."""

    def decode_images(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> uint8 [B, 3, h, w]."""


class Drafter(Protocol):
    """Proposes a tree each round. Holds its own cache between `start` and the end of the image."""

    depth: int  # L, depth of the deepest node
    nodes: int  # N, nodes of the tree, the root included
    slots: int  # uniforms it consumes a round

    def start(self, target: Any, prompt: Prompt, output: TargetOutput, token: Tensor, sampling: Any) -> None:
        """Begin a batch: output of the prefill and the first sampled token [B]."""

    def propose(self, uniforms: Tensor) -> DraftTree:
        """uniforms float32 [B, slots] -> a tree rooted at the last committed token."""

    def observe(self, output: TargetOutput, verification: Verification, committed: int) -> None:
        """See the target's output on the whole tree and what was committed; committed = image tokens that the longest
        row has now (known to the host)."""


class AcceptProbs(Protocol):
    """The least a rule can be: A = draft * accept. It may have what `AcceptanceRule` may have.

    Any: a recipe's class_path is held against these types, and a rule of one's own need not be annotated.
    """

    def accept_probs(self, target_probs: Any, draft_probs: Any, depth: Any) -> Any:
        """Tensors [..., V], [..., V] and, 1-based, [..., 1] -> probability of accepting each token, [..., V]."""


class AcceptanceRule(Protocol):
    """How much of the draft's mass to accept at one position: a function of two distributions (THEORY.md section 3).

    A rule may also have
    lossless = True                                                      the output follows the target exactly
    bind(target) -> rule                                                 called once by `generate`: fetch what it needs
    accepted_at(target_probs, draft_probs, relaxation, tokens) -> [..., K]   A at tokens long [..., K] alone
    resampling = "own", resample(target_probs [B, V], draft_probs [B, V], relaxation, token [B, 1]) -> [B, V]
        the distribution after `token` was rejected, where that is not the optimal one
    """

    def schedule(self, length: int) -> Tensor:
        """Relaxation w of each depth, float32 [length]; called once with the drafter's depth."""

    def accepted_mass(self, target_probs: Tensor, draft_probs: Tensor, relaxation: Tensor) -> Tensor:
        """A = min(draft, relaxed mass), [..., V]; relaxation [..., 1] is the schedule at the depth of each position."""
