"""LlamaGen: a Llama-style decoder over VQ codes, prompted by caption embeddings (Sun et al. 2024, arXiv 2406.06525).

Knows the transformer, its caption encoders and its image tokenizer; knows no draft and no rule.

    slot     0 .. P-1            P        P+1      ...
    input    caption (left pad)  token 0  token 1  ...      rope: zero on the prompt, (row, column) on the grid
    output   ... P-1: token 0    token 1  token 2  ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coolsd.checkpoint import load_made, read_tensors, save_checkpoint
from coolsd.interfaces import DraftTree, Prompt, TargetOutput
from coolsd.kv_cache import KVCache, forced_mask
from coolsd.targets.captions import ClassLabels, T5Encoder, WordEncoder, read_vocabulary
from coolsd.transformer import Linear, Transformer, TransformerConfig, grid_rope


@dataclass(frozen=True)
class LlamaGenConfig:
    """Shape of a LlamaGen target. sketch_rank = 0 is the published architecture.

    words: size of the caption vocabulary of a `WordEncoder`. classes: prompted by a class number instead, in one slot.
    Neither: by captions in text_encoder's words, a T5 by name. sketch_rank, sketch_reach: see `CaptionSketch`.
    """

    transformer: TransformerConfig
    codebook_size: int
    grid: tuple[int, int]
    prompt_slots: int
    caption_dim: int = 0
    words: int = 0
    sketch_rank: int = 0
    sketch_reach: int = 6
    rope_base: float = 10000.0
    classes: int = 0
    text_encoder: str = "google/flan-t5-xl"

    def __post_init__(self) -> None:
        numbers = {"codebook_size": 1, "caption_dim": 0, "words": 0, "sketch_rank": 0}
        for name, least in {**numbers, "sketch_reach": 1, "classes": 0}.items():
            if type(value := getattr(self, name)) is not int or not least <= value <= 1 << 24:
                raise ValueError(f"{name} is {value!r}, but must be an integer from {least} to {1 << 24}")
        most = 1 if self.classes else 1 << 12  # rows of the rotary table, which no weight's shape bounds
        if type(self.prompt_slots) is not int or not 0 < self.prompt_slots <= most:
            raise ValueError(f"prompt_slots is {self.prompt_slots!r}, but must be an integer from 1 to {most}")
        if len(self.grid) != 2 or not all(type(side) is int and 0 < side <= 1 << 10 for side in self.grid):
            raise ValueError(f"grid is {list(self.grid)}, but must be [rows, columns], each from 1 to {1 << 10}")
        if self.grid[0] * self.grid[1] > 1 << 16:
            raise ValueError(f"grid is {list(self.grid)}, but must have at most {1 << 16} tokens")
        if type(self.rope_base) not in (int, float) or not 1 < self.rope_base < math.inf:
            raise ValueError(f"rope_base is {self.rope_base!r}, but must be a number above 1")

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> LlamaGenConfig:
        value = {key: entry for key, entry in value.items() if key != "architecture"}
        try:
            return cls(
                **{**value, "transformer": TransformerConfig(**value["transformer"]), "grid": tuple(value["grid"])}
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the config of a LlamaGen target: {error}") from None


class CaptionProjection(nn.Module):
    """Caption features [..., caption_dim] -> prompt embeddings [..., H]; no bias, so padding (zeros) stays zero."""

    def __init__(self, caption_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(caption_dim, hidden_size, bias=False)
        self.fc2 = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(features), approximate="tanh"))


class CaptionSketch(nn.Module):
    """One pooled caption vector, unfolded over the grid: what a word-level encoder can say about where things are.

    The pooled vector becomes a plane of `rank` channels per image token; the input that predicts token n gets the
    plane at n .. n + reach - 1 added, so that hidden states, all that a draft head sees, know what comes next too.
    Computed once per caption, costs nothing per token.
    """

    def __init__(self, caption_dim: int, hidden_size: int, tokens: int, rank: int, reach: int) -> None:
        super().__init__()
        self.tokens, self.rank, self.reach = tokens, rank, reach
        self.null = nn.Parameter(torch.zeros(caption_dim))
        self.pooled = nn.Sequential(nn.Linear(caption_dim, caption_dim), nn.GELU(), nn.Linear(caption_dim, caption_dim))
        self.plane = nn.Linear(caption_dim, tokens * rank)
        self.spread = nn.Linear(rank * reach, hidden_size, bias=False)
        self.everywhere = nn.Linear(caption_dim, hidden_size, bias=False)

    def forward(self, pooled: Tensor) -> Tensor:
        """pooled [..., caption_dim] -> [..., T + 1, H]: row n is added to the input that predicts token n."""
        pooled = pooled + self.pooled(pooled)
        plane = self.plane(pooled).unflatten(-1, (self.tokens, self.rank))
        windows = (
            F.pad(plane, (0, 0, 0, self.reach)).unfold(-2, self.reach, 1).flatten(-2)
        )  # [..., T + 1, rank * reach]
        return self.spread(windows) + self.everywhere(pooled).unsqueeze(-2)


class LlamaGen(nn.Module):
    """See `coolsd.interfaces.TargetModel` for the shapes of its methods."""

    layout = None
    rope: Tensor
    image_tokenizer: Any
    caption_encoder: Any

    def __init__(self, config: LlamaGenConfig, caption_encoder: Any, image_tokenizer: Any = None) -> None:
        super().__init__()
        self.config = config
        self.image_tokens = config.grid[0] * config.grid[1]
        self.codebook_size = config.codebook_size
        self.hidden_size = config.transformer.hidden_size
        self.layers: tuple[int, ...] = ()
        self.layer_count = config.transformer.layers
        self.fingerprint = "unsaved"
        self.folder: Path | None = None  # where it was loaded from: tables made of its weights are kept there
        self.embedding = nn.Embedding(config.codebook_size, self.hidden_size)
        self.caption_encoder = caption_encoder
        if config.classes:  # the last row is no class
            self.class_embedding = nn.Embedding(config.classes + 1, self.hidden_size)
        else:
            self.caption_projection = CaptionProjection(config.caption_dim, self.hidden_size)
            self.null_caption = nn.Parameter(
                torch.randn(config.prompt_slots, config.caption_dim) / math.sqrt(config.caption_dim)
            )
        self.sketch = (
            CaptionSketch(
                config.caption_dim, self.hidden_size, self.image_tokens, config.sketch_rank, config.sketch_reach
            )
            if config.sketch_rank
            else None
        )
        self.transformer = Transformer(config.transformer)
        self.lm_head = Linear(self.hidden_size, config.codebook_size)
        rope = grid_rope(config.prompt_slots, *config.grid, config.transformer.head_dim, config.rope_base)
        self.register_buffer("rope", rope, persistent=False)
        object.__setattr__(self, "image_tokenizer", image_tokenizer)  # not a part of this module's weights

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def _apply(self, fn: Any, recurse: bool = True) -> LlamaGen:
        rope = self.rope
        super()._apply(fn, recurse)
        self.rope = rope.to(self.rope.device)  # positions stay exact whatever the weights' dtype
        if self.image_tokenizer is not None:
            self.image_tokenizer.to(self.rope.device)
        if isinstance(self.caption_encoder, T5Encoder):
            self.caption_encoder.device = self.rope.device
        return self

    def problem(self, caption: str) -> str | None:
        return self.caption_encoder.problem(caption)

    def encode(self, captions: Sequence[str], guidance: bool) -> Prompt:
        """B captions -> prompt with G = 2 branches (caption, null caption with the caption's mask) or G = 1."""
        features, mask = self.caption_encoder(captions, self.config.prompt_slots)
        features, mask = features.to(self.device), mask.to(self.device)
        if self.config.classes:
            features = self.class_embedding(features.flatten(1))
            null = self.class_embedding(torch.tensor([self.config.classes], device=self.device))
        else:
            features, null = features.to(self.dtype), self.null_caption
        branches = [features, null.expand_as(features)] if guidance else [features]
        inputs = {"features": torch.stack(branches, dim=1)}
        if self.sketch is not None:
            pooled = features.sum(1) / mask.sum(1, keepdim=True).to(features.dtype).sqrt()
            pooled_branches = [pooled, self.sketch.null.expand_as(pooled)] if guidance else [pooled]
            inputs["context"] = self.sketch(torch.stack(pooled_branches, dim=1))  # [B, G, T + 1, H]
        return Prompt(tuple(captions), mask[:, None].expand(-1, len(branches), -1), inputs)

    def _prompt_embeddings(self, prompt: Prompt) -> Tensor:
        x = prompt.inputs["features"]
        x = (x if self.config.classes else self.caption_projection(x)).flatten(0, 1)  # [R, P, H]
        if self.sketch is None:
            return x
        return torch.cat([x[:, :-1], x[:, -1:] + prompt.inputs["context"].flatten(0, 1)[:, :1]], dim=1)

    def _token_embeddings(self, tokens: Tensor, index: Tensor, prompt: Prompt) -> Tensor:
        """tokens [B, N] at image positions index [R or 1, N] -> [R, N, H]."""
        x = self.embedding(tokens).repeat_interleave(prompt.branches, dim=0)
        if self.sketch is None:
            return x
        context = prompt.inputs["context"].flatten(0, 1)
        rows = torch.arange(context.shape[0], device=index.device)[:, None]
        return x + context[rows, (index + 1).clamp(max=self.image_tokens)]

    def _output(
        self, x: Tensor, rope: Tensor, mask: Tensor, branches: int, logits_from: int = 0,
        cache: KVCache | None = None, flat: Tensor | None = None,
    ) -> TargetOutput:  # fmt: skip
        shown = dict.fromkeys(self.layers, x)
        hidden = self.transformer(x, rope, mask, cache, flat, shown or None)
        logits = self.lm_head(hidden[:, logits_from:])
        layers = {number: states.unflatten(0, (-1, branches)) for number, states in shown.items()}
        return TargetOutput(logits.unflatten(0, (-1, branches)), hidden.unflatten(0, (-1, branches)), layers)

    def prefill(self, prompt: Prompt, tree_slots: int) -> tuple[TargetOutput, KVCache]:
        slots = self.config.prompt_slots
        mask = prompt.mask.flatten(0, 1)
        cache = self.transformer.new_cache(mask.shape[0], slots + self.image_tokens + tree_slots, mask)
        flat, bias = cache.place(slots)
        x, rope = self._prompt_embeddings(prompt), self.rope[None, :slots]
        output = self._output(x, rope, bias, prompt.branches, slots - 1, cache, flat)
        cache.keep(None, torch.full_like(cache.length, slots), slots)
        return output, cache

    def score(self, tree: DraftTree, prompt: Prompt, cache: KVCache) -> TargetOutput:
        ancestors, depths = tree.places(prompt.branches)
        flat, bias = cache.place(tree.nodes, ancestors)
        position = cache.length[:, None] + depths  # [R, N]
        x = self._token_embeddings(tree.tokens, position - self.config.prompt_slots, prompt)
        rope = self.rope[position.clamp(max=self.rope.shape[0] - 1)]
        return self._output(x, rope, bias, prompt.branches, 0, cache, flat)

    def forced(self, prompt: Prompt, tokens: Tensor) -> TargetOutput:
        slots, length = self.config.prompt_slots, tokens.shape[1]
        index = torch.arange(length, device=tokens.device)[None]
        x = torch.cat([self._prompt_embeddings(prompt), self._token_embeddings(tokens, index, prompt)], dim=1)
        mask = forced_mask(prompt.mask.flatten(0, 1), length)
        output = self._output(x, self.rope[None, : slots + length], mask, prompt.branches, slots - 1)
        return replace(output, logits=output.logits[:, :, :-1])

    def encode_images(self, images: Tensor) -> Tensor:
        return self.image_tokenizer.encode_images(images)

    def decode_images(self, tokens: Tensor) -> Tensor:
        return self.image_tokenizer.decode_images(tokens)

    def codebook(self) -> Tensor:
        """[V, D], the image tokenizer's codes as stored. Raises ValueError where the target has no image tokenizer."""
        if self.image_tokenizer is None:
            raise ValueError(
                f"target {self.fingerprint} has no image tokenizer, so no codebook; put one into its folder "
                "image_tokenizer"
            )
        return self.image_tokenizer.raw_codebook()

    def ends(self) -> dict[str, Tensor]:
        """What training a draft head needs of this target: the cache carries it, so `fit` never loads the target."""
        return {
            "embedding": self.embedding.weight,
            "norm": cast(Tensor, self.transformer.norm.weight),
            "lm_head": self.lm_head.weight,
            "rope": self.rope,
        }

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        config = {"architecture": "llamagen", **asdict(self.config)}
        tensors = {name: tensor.to(dtype) for name, tensor in self.state_dict().items()}
        words = self.config.words
        vocabulary = {"captions.json": self.caption_encoder.tokenizer.to_str()} if words else {}
        self.fingerprint = f"{folder.name}@{save_checkpoint(folder, config, tensors, vocabulary)}"

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> LlamaGen:
        own = LlamaGenConfig.from_json(config)
        words = read_vocabulary(folder / "captions.json", own.words) if own.words else None

        def encoder() -> Any:
            if words is not None:
                return WordEncoder(words, own.words, own.caption_dim)
            return ClassLabels(own.classes) if own.classes else T5Encoder(own.text_encoder, folder / "captions")

        model = load_made(lambda: cls(own, encoder()), read_tensors(folder), folder / "model.safetensors")
        model.folder = folder
        return model
