"""What a head is trained on: a target's hidden states for captioned images, one forced pass each.

Knows datasets and a target's interface; knows no file. `training.extraction` writes the states to a cache,
`data.loader.OnlineFeatures` hands them to a training as they are made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from coolsd.heads.checkpoint import show_layers
from coolsd.interfaces import Prompt, TargetOutput
from coolsd.sampling import Sampling, counter_uniforms
from data.features import CachedSample, CacheSettings, Skipped


class BadItem(ValueError):
    """An item that cannot be used: `reason` is one of few, to be counted; `detail` says more; `item` says which."""

    def __init__(self, reason: str, detail: str = "", item: str = "") -> None:
        super().__init__(": ".join(filter(None, (item, reason, detail))))
        self.reason, self.detail, self.item = reason, detail, item


class Selection:
    """Items of a map-style dataset of {"image": uint8 [3, h, w], "caption": str}; null takes the embedded emojis.

    limit: so many of them, chosen at random but always the same, or the first ones of a dataset that is `ordered`.
    """

    def __init__(self, dataset: Dataset | None, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit is {limit}, but must be >= 1, or null for all samples")
        if dataset is None:
            from data.emoji.dataset import EmojiImages

            dataset = EmojiImages("train")
        self.dataset: Any = dataset
        found = len(self.dataset)
        if not found:
            raise ValueError(f"{type(dataset).__name__} is empty; point it at captioned images")
        # a dataset may be sorted, yet its first samples should stand for it: the loader holds out the last ones
        order = torch.randperm(found, generator=torch.Generator().manual_seed(0)).tolist()
        self.chosen = list(range(found) if getattr(dataset, "ordered", False) else order)[:limit]

    def __len__(self) -> int:
        return len(self.chosen)

    def read(self, index: int, image: bool = True) -> tuple[Tensor | None, str]:
        """(image or None, caption) of an item. Raises BadItem."""
        if not image and hasattr(self.dataset, "caption"):
            return None, self.dataset.caption(self.chosen[index])
        sample = self.dataset[self.chosen[index]]
        return sample["image"] if image else None, sample["caption"]

    def some_caption(self, problem: Callable[[str], str | None]) -> str:
        """The first one that can be read and has no problem. Raises ValueError where there is none."""
        for index in range(len(self)):
            try:
                caption = self.read(index, image=False)[1]
            except BadItem:
                continue
            if problem(caption) is None:
                return caption
        raise ValueError(f"none of {len(self)} captions can be read")

    def fingerprint(self) -> str:
        """The dataset's own `fingerprint` where it has one, else its class, its size and a hash of 16 items."""
        own = getattr(self.dataset, "fingerprint", None)
        if isinstance(own, str):
            return own if len(self) == len(self.dataset) else f"{own}[:{len(self)}]"
        digest = hashlib.sha256()
        for i in range(16):
            try:
                image, caption = self.read(i * (len(self) - 1) // 15)
            except BadItem as bad:
                digest.update(str(bad).encode(errors="replace"))
                continue
            assert image is not None
            digest.update(caption.encode(errors="replace"))
            digest.update(image.contiguous().numpy().tobytes())
        return f"{type(self.dataset).__name__}[{len(self)}]@{digest.hexdigest()[:12]}"


def read_batch(
    selection: Selection, indices: Sequence[int], images: bool, problem: Callable[[str], str | None] | None = None
) -> tuple[Tensor | None, tuple[str, ...], tuple[int, ...], tuple[Skipped, ...]]:
    """Images uint8 [B, 3, h, w] or None, B captions, the B indices that could be read, and those that could not.

    problem: says of a caption why the target refuses it, or None.
    """
    pixels, captions, kept, skipped = [], [], [], []
    for index in indices:
        try:
            image, caption = selection.read(index, images)
            if problem is not None and (why := problem(caption)) is not None:
                raise BadItem(f"caption with {why}", caption[:60], f"item {index}")
        except BadItem as bad:
            skipped.append(Skipped(index, bad.item, bad.reason, bad.detail))
            continue
        pixels.append(image)
        captions.append(caption)
        kept.append(index)
    return (torch.stack(pixels) if images and kept else None), tuple(captions), tuple(kept), tuple(skipped)


class States:
    """The states of a target for captioned images, as `settings` describes them.

    source: "images" encodes the dataset's images; "self-distill" lets the target draw images for its captions by plain
    decoding, with `sampling` and `seed`; image i is a function of (caption, seed, i).
    guidance: both branches of every sample. null_fraction: without guidance, the share of samples whose caption is the
    null caption (LANTERN's data: 0.1), chosen by seed and index. layers: of the target, kept for a `MultiLayerHead`.
    Raises ValueError where these contradict each other, or the target has no image tokenizer to encode with.
    """

    def __init__(
        self,
        target: Any,
        source: Literal["images", "self-distill"] = "images",
        guidance: bool = True,
        null_fraction: float = 0.0,
        sampling: Sampling | None = None,
        seed: int = 0,
        layers: Sequence[int] = (),
    ) -> None:
        if not 0 <= null_fraction < 1:
            raise ValueError(f"null_fraction is {null_fraction}, but must be in [0, 1)")
        if null_fraction and guidance:
            raise ValueError("with guidance every sample has a null branch; null_fraction goes with guidance false")
        if sampling is not None and source != "self-distill":
            raise ValueError('sampling decides how the target draws images; give it with source "self-distill" only')
        if source == "images" and target.image_tokenizer is None:
            raise ValueError(f"{target.fingerprint} has no image tokenizer beside it, so it cannot encode images")
        self.target, self.source, self.guidance, self.null_fraction = target, source, guidance, null_fraction
        self.sampling, self.seed = sampling or Sampling(), seed
        show_layers(target, layers)
        self.layers = tuple(layers)
        self.ends = {name: tensor.detach().cpu() for name, tensor in target.ends().items()}
        self.checked = False

    def settings(self, selection: Selection, samples_per_shard: int, dtype: str) -> CacheSettings:
        self.caption = selection.some_caption(self.target.problem)
        prompt = self.prompt([self.caption], [0])
        how: dict[str, Any] = {"source": self.source, "target_dtype": str(self.target.dtype).removeprefix("torch.")}
        if self.source == "self-distill":
            how |= {"sampling": asdict(self.sampling), "seed": self.seed}
        if self.null_fraction:
            how |= {"null_fraction": self.null_fraction, "seed": self.seed}
        return CacheSettings(
            target=self.target.fingerprint,
            dataset=selection.fingerprint(),
            hidden_size=self.target.hidden_size,
            prompt_slots=prompt.mask.shape[-1],
            image_tokens=self.target.image_tokens,
            codebook_size=self.target.codebook_size,
            branches=prompt.branches,
            samples=len(selection),
            samples_per_shard=samples_per_shard,
            dtype=dtype,
            context="context" in prompt.inputs,
            layers=self.layers,
            settings=how,
        )

    def prompt(self, captions: Sequence[str], indices: Sequence[int]) -> Prompt:
        """G branches, or where some captions are to be null one, that of the caption or of the null caption."""
        if not self.null_fraction:
            return self.target.encode(captions, self.guidance)
        both = self.target.encode(captions, True)
        null = counter_uniforms(self.seed, torch.tensor(indices), 0, 1, 1)[0, :, 0] < self.null_fraction
        return both.choose(null.long().to(both.mask.device))

    @torch.no_grad()
    def __call__(self, images: Tensor | None, captions: Sequence[str], indices: Sequence[int]) -> list[CachedSample]:
        """images uint8 [B, 3, h, w] (None for self-distill), B captions, their indices -> B samples, on the host."""
        prompt = self.prompt(captions, indices)
        tokens = self._tokens(images, captions, indices)
        output = self.target.forced(prompt, tokens)
        if not self.checked:
            self._check(output)
        caption = torch.full(prompt.mask.shape, -1, device=tokens.device)
        ids = torch.cat([caption, tokens[:, None].expand(-1, prompt.branches, -1)], dim=-1)  # [B, G, P + T]
        held = torch.cat([prompt.mask, torch.ones_like(ids[..., prompt.mask.shape[-1] :], dtype=torch.bool)], dim=-1)
        hidden, ids, held = output.hidden_states.cpu(), ids.cpu(), held.cpu()
        layers = torch.cat([output.layers[layer] for layer in self.layers], -1).cpu() if self.layers else None
        context = prompt.inputs["context"].cpu() if "context" in prompt.inputs else None
        return [
            CachedSample(
                words,
                tuple(hidden[b, g][held[b, g]] for g in range(prompt.branches)),
                tuple(ids[b, g][held[b, g]] for g in range(prompt.branches)),
                None if context is None else context[b],
                () if layers is None else tuple(layers[b, g][held[b, g]] for g in range(prompt.branches)),
            )
            for b, words in enumerate(captions)
        ]

    def idle(self) -> list[CachedSample]:
        """A pass without a sample: where weights are sharded, all processes must take part in each."""
        tokens = torch.zeros(1, self.target.image_tokens, dtype=torch.long, device=self.target.device)
        if self.source == "self-distill":
            tokens = self._tokens(None, [self.caption], [0])
        self.target.forced(self.prompt([self.caption], [0]), tokens)
        return []

    def _tokens(self, images: Tensor | None, captions: Sequence[str], indices: Sequence[int]) -> Tensor:
        """Image tokens [B, T] of the batch."""
        if images is not None:
            tokens = self.target.encode_images(images.to(self.target.device))
            if tokens.shape[1] != self.target.image_tokens:
                height, width = images.shape[-2:]
                raise ValueError(
                    f"images of {width} x {height} pixels make {tokens.shape[1]} tokens, but the target has "
                    f"{self.target.image_tokens}; set the dataset's size to the target's"
                )
            return tokens
        from coolsd.decode import generate

        drawn = generate(
            self.target, captions, sampling=self.sampling, seed=self.seed, rows=indices, decode_images=False
        )
        return drawn.tokens

    def _check(self, output: TargetOutput) -> None:
        """The stored states must give the target's logits again, else a head trained on them is worthless."""
        first = output.hidden_states.shape[2] - output.logits.shape[2] - 1  # slot whose state gives token 0
        again = output.hidden_states[:, :, first:-1] @ self.ends["lm_head"].to(output.hidden_states).T
        held = output.logits > torch.finfo(output.logits.dtype).min  # what the layout leaves
        error = (again[held] - output.logits[held]).float().norm() / output.logits[held].float().norm()
        if not error < 0.02:
            raise ValueError(f"the target's hidden states do not give its logits (relative error {error:.3f})")
        self.checked = True
