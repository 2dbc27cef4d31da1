"""How good emoji images are, by a small network of the repository's own: every column is filled without a download.

Knows 64-pixel pictures and words; knows no method, target or run. Not FID and not CLIP score, and never called so:
numbers of this network compare with each other only.
"""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from coolsd.checkpoint import find_folder, fingerprint, load_made, read_json, read_tensors, save_checkpoint
from coolsd.metrics import FID, ImageMetric, squares, weights_hash
from coolsd.targets.captions import WordEncoder, read_vocabulary

SIZE = 64  # pixels a side
SLOTS = 24  # words of a caption


@dataclass(frozen=True)
class CaptionImageConfig:
    """words: of the caption vocabulary. width: of a word's vector. channels: of the image at 32, 16, 8 and 4 pixels a
    side. features: size of what both sides are mapped to."""

    words: int
    width: int = 64
    channels: tuple[int, int, int, int] = (32, 64, 128, 192)
    features: int = 32

    def __post_init__(self) -> None:
        for number in (self.words, self.width, self.features, *self.channels):
            if type(number) is not int or not 0 < number <= 1 << 24 or len(self.channels) != 4:
                raise ValueError("a caption-image network's config has positive integers, four of them as channels")


class Block(nn.Module):
    """x + f(x), two 3 x 3 convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1, bias=False)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class CaptionImageNetwork(nn.Module):
    """Images and captions as points that lie close where they belong together (CLIP's objective, arXiv 2103.00020)."""

    def __init__(self, config: CaptionImageConfig, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.config = config
        self.num_features = config.features  # asked for by torchmetrics
        first, *_, last = config.channels
        stages: list[nn.Module] = [nn.Conv2d(3, first, 4, 2, 1)]
        for before, after in itertools.pairwise(config.channels):
            stages += [nn.BatchNorm2d(before), nn.ReLU(), nn.Conv2d(before, after, 3, 2, 1, bias=False), Block(after)]
        self.image = nn.Sequential(*stages, nn.BatchNorm2d(last), nn.ReLU())
        self.image_out = nn.Linear(last, config.features)
        self.words = WordEncoder(tokenizer, config.words, config.width)
        self.phrases = nn.Conv1d(config.width, 2 * config.width, 3, padding=1)  # a red apple or a red background
        self.caption_out = nn.Sequential(nn.GELU(), nn.Linear(2 * config.width, config.features))

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [B, 3, 64, 64] -> float32 [B, features]."""
        return self.image_out(self.image(images / 127.5 - 1).mean((2, 3)))

    def captions(self, captions: Sequence[str]) -> Tensor:
        """B captions -> float32 [B, features]; unknown words share a vector. ValueError for one without words."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a target warns of words that it does not know, here they cost little
            words, mask = self.words(captions, SLOTS)
        phrases = self.phrases(words.mT).mT * mask[..., None]
        return self.caption_out(phrases.sum(1) / mask.sum(1, keepdim=True))

    def save(self, folder: Path) -> str:
        config = {"architecture": "caption-image", **asdict(self.config)}
        return save_checkpoint(folder, config, self.state_dict(), {"captions.json": self.words.tokenizer.to_str()})

    @classmethod
    def load(cls, name: str | Path) -> CaptionImageNetwork:
        """From a checkpoint folder, or a name under checkpoints/. Raises ValueError or OSError where it is none."""
        folder = find_folder(name)
        fingerprint(folder)
        config = read_json(folder / "config.json")
        if config.pop("architecture", None) != "caption-image":
            raise ValueError(f"{folder} is no caption-image network")
        try:
            shape = CaptionImageConfig(**{**config, "channels": tuple(config["channels"])})
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{folder / 'config.json'} is not the config of a caption-image network: {error}"
            ) from None
        words = read_vocabulary(folder / "captions.json", shape.words)
        network = load_made(lambda: cls(shape, words), read_tensors(folder), folder / "model.safetensors")
        return network.eval().requires_grad_(False)


class FrechetEmoji(FID):
    """Frechet distance between a method's images and the embedded emojis, by features of `CaptionImageNetwork`.

    Depends on the number of images, as FID does: compare equal numbers only.
    """

    column = "fd_emoji"

    def __init__(
        self, split: Literal["train", "combo", "novel"] = "combo", network: str = "emoji/metrics", batch_size: int = 64
    ) -> None:
        """
        Args:
            split: The real images, jittered as in training: those of the held-out captions, unless told otherwise.
            network: Checkpoint folder, or its name under checkpoints/.
            batch_size: Images a pass of the network.
        """
        super().__init__(Path("data/emoji"), size=SIZE, batch_size=batch_size)
        self.split, self.network = split, network

    def missing(self) -> str | None:
        try:
            self.feature = CaptionImageNetwork.load(self.network)
            importlib.import_module("data.emoji.dataset")
        except (OSError, ValueError, ImportError) as error:
            return f"{self.column}: {error}; the network and the emojis come with the repository"
        return None

    def reals(self) -> Iterator[Tensor]:
        emoji = importlib.import_module("data.emoji.dataset")  # by name: coolsd does not depend on data
        return (item["image"] for item in emoji.EmojiImages(self.split))

    def about(self) -> dict[str, Any]:
        return {**super().about(), "real": f"data/emoji, {self.split}"}


class ClipEmoji(ImageMetric):
    """100 max(0, cosine of the image's and the caption's features), the mean of all images."""

    column = "clip_emoji"

    def __init__(self, network: str = "emoji/metrics", batch_size: int = 64) -> None:
        """
        Args:
            network: Checkpoint folder, or its name under checkpoints/.
            batch_size: Images a pass of the network.
        """
        if batch_size < 1:
            raise ValueError(f"ClipEmoji batch_size is {batch_size}, but must be >= 1")
        self.name, self.batch_size = network, batch_size
        self._network: CaptionImageNetwork | None = None
        self._found: dict[str, Any] = {}

    def missing(self) -> str | None:
        try:
            self._network = CaptionImageNetwork.load(self.name)
        except (OSError, ValueError) as error:
            return f"{self.column}: {error}; the network comes with the repository"
        return None

    def each(self, pictures: Sequence[Path], captions: Sequence[str], device: torch.device) -> list[float]:
        """Raises ValueError for a caption without words."""
        network = (self._network or CaptionImageNetwork.load(self.name)).to(device)
        scores: list[float] = []
        for first in range(0, len(pictures), self.batch_size):
            batch = slice(first, first + self.batch_size)
            with torch.inference_mode():
                images = network(torch.stack(list(squares(pictures[batch], SIZE))).to(device))
                cosines = F.cosine_similarity(images, network.captions(captions[batch]), dim=-1)
            scores += (100 * cosines.clamp(min=0)).tolist()
        self._found = {"network": weights_hash(network), "images": len(pictures)}
        return scores

    def about(self) -> dict[str, Any]:
        return {"model": self.name, **self._found}
