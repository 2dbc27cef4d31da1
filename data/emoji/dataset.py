"""Captioned emojis, composed at load time.  Knows emoji.parquet, backgrounds and splits; knows nothing of tokens.

    emoji on alpha [64, 64]  ->  resized to `scale` pixels  ->  pasted on a plain colour at (left, top)  ->  [3, 64, 64]

Every image is a pure function of (name, style, background, scale, left, top), and the jitter one of
(seed, epoch, index), so a feature cache or a metric can name its images instead of storing them.
"""

import functools
import hashlib
import io
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image

if TYPE_CHECKING:
    import datasets

PARQUET = Path(__file__).with_name("emoji.parquet")
SIZE = 64  # pixels, of every composed image
STYLES = ("noto", "twemoji")
SPLITS = ("train", "combo", "novel")
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "gray": (130, 130, 130),
    "light blue": (170, 215, 250),
    "dark blue": (25, 45, 125),
    "light green": (165, 230, 150),
    "yellow": (255, 236, 100),
    "orange": (250, 140, 20),
    "red": (205, 30, 40),
    "pink": (255, 165, 205),
    "purple": (120, 60, 175),
    "brown": (120, 75, 45),
}
COMBO_FRACTION = 0.1  # of (name, style, background), kept from training though each part is seen there
SMALLEST = 60  # pixels, of a jittered emoji
STILL_SCALE = 62  # pixels, without jitter


@dataclass(frozen=True)
class EmojiItem:
    """What one composed image shows; `split` is "train", "combo" or "novel"."""

    name: str
    article: str
    style: str
    category: str
    background: str
    caption: str
    split: str


def caption(name: str, article: str, style: str, background: str) -> str:
    """ "noto emoji of a red apple on a light blue background"; white goes without saying."""
    subject = f"{style} emoji of {article} {name}" if article else f"{style} emoji of {name}"
    if background == "white":
        return subject
    return f"{subject} on {'an' if background[0] in 'aeiou' else 'a'} {background} background"


def items(split: str, core: bool = True) -> list[EmojiItem]:
    """All images of a split, sorted by name, style and background.

    novel: every combination of the names held out whole.  combo: 10% of the other combinations, by hash.
    train: the rest.  core: only the names known at a glance; False adds all others, split by the same rule.
    """
    if split not in SPLITS:
        raise ValueError(f"no split named {split!r}; choose one of {', '.join(SPLITS)}")
    return list(_items(split, core))


def render(item: EmojiItem, scale: int = SIZE, left: int = 0, top: int = 0) -> np.ndarray:
    """One image, uint8 [64, 64, 3]: the emoji `scale` pixels wide with its corner at (left, top)."""
    return np.ascontiguousarray(_compose(item, scale, left, top).transpose(1, 2, 0))


class EmojiImages(torch.utils.data.Dataset):
    """Composed images with captions; with `jitter` a little larger or smaller, and moved, each epoch.

    smallest: jittered emojis are smallest to 64 pixels wide. limit: a stable spread-out choice of so many items; a
    smaller limit is contained in a larger one.
    """

    def __init__(
        self,
        split: str,
        core: bool = True,
        jitter: bool = True,
        seed: int = 0,
        limit: int | None = None,
        smallest: int = SMALLEST,
    ) -> None:
        if not 1 <= smallest <= SIZE:
            raise ValueError(f"smallest is {smallest} pixels, but the canvas has {SIZE}; give 1 to {SIZE}")
        self.smallest = smallest
        self.items = _limited(items(split, core), limit)
        self.jitter = jitter
        self.seed = seed
        # shared memory, so that persistent loader workers see set_epoch too
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Chooses the jitter of the following passes; call it before iterating."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.items)

    def placement(self, index: int) -> tuple[int, int, int]:
        """(scale, left, top) in pixels of an item in this epoch: a function of (seed, epoch, index) alone."""
        if not self.jitter:
            return STILL_SCALE, (SIZE - STILL_SCALE) // 2, (SIZE - STILL_SCALE) // 2
        key = struct.pack("<3q", self.seed, int(self._epoch), index)
        a, b, c = struct.unpack("<3Q", hashlib.blake2b(key, digest_size=24).digest())
        scale = self.smallest + a % (SIZE - self.smallest + 1)
        free = SIZE - scale + 1
        return scale, b % free, c % free

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"image": uint8 [3, 64, 64], "caption": str, "index": int}."""
        if not 0 <= index < len(self.items):  # IndexError also ends a plain `for` loop
            raise IndexError(f"index {index} is outside this dataset of {len(self.items)} items; use 0 to len - 1")
        item = self.items[index]
        image = torch.from_numpy(_compose(item, *self.placement(index)))
        return {"image": image, "caption": item.caption, "index": index}


def as_dataset(split: str, core: bool = True, limit: int | None = None) -> "datasets.Dataset":
    """The same images, without jitter, as a `datasets.Dataset` in memory with columns image and caption."""
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageColumn

    images = EmojiImages(split, core, jitter=False, limit=limit)
    columns = {
        "image": [Image.fromarray(render(item, *images.placement(i))) for i, item in enumerate(images.items)],
        "caption": [item.caption for item in images.items],
    }
    return Dataset.from_dict(columns, features=Features({"image": ImageColumn(), "caption": Value("string")}))


def _fraction(*words: str) -> float:
    """Stable uniform number in [0, 1) from words."""
    return int.from_bytes(hashlib.sha256("|".join(words).encode()).digest()[:8], "big") / 2**64


def _limited(chosen: list[EmojiItem], limit: int | None) -> list[EmojiItem]:
    if limit is None:
        return chosen
    if not 1 <= limit <= len(chosen):
        raise ValueError(
            f"limit={limit}, but this split has {len(chosen)} items; give 1 to {len(chosen)}, or None for all"
        )
    kept = sorted(chosen, key=lambda item: _fraction("limit", item.caption))[:limit]
    return sorted(kept, key=lambda item: (item.name, item.style, item.background))


@functools.cache
def _items(split: str, core: bool) -> tuple[EmojiItem, ...]:
    found = []
    for row in _rows().values():
        if core and not row["core"]:
            continue
        name, style = row["name"], row["style"]
        for background in sorted(BACKGROUNDS):
            kind = row["split"]
            if kind == "train" and _fraction(name, style, background) < COMBO_FRACTION:
                kind = "combo"
            if kind == split:
                words = caption(name, row["article"], style, background)
                found.append(EmojiItem(name, row["article"], style, row["category"], background, words, split))
    return tuple(found)


@functools.cache
def _rows() -> dict[tuple[str, str], dict]:
    """(name, style) -> row of the parquet."""
    return {(row["name"], row["style"]): row for row in pq.read_table(PARQUET).to_pylist()}


@functools.cache
def _premultiplied(name: str, style: str, scale: int) -> tuple[np.ndarray, np.ndarray]:
    """Resized emoji: colour times alpha, uint8 [3, scale, scale]; 255 - alpha, uint16 [1, scale, scale].

    Resizing colour times alpha, not colour, keeps the invisible colour of transparent pixels out of the edge.
    """
    if (name, style) not in _rows():
        raise ValueError(f"no emoji {name!r} in style {style!r}; take the items from data.emoji.dataset.items")
    image = Image.open(io.BytesIO(_rows()[name, style]["image"]["bytes"])).convert("RGBA").convert("RGBa")
    if scale != SIZE:
        image = image.resize((scale, scale), Image.Resampling.LANCZOS)
    pixels = np.asarray(image).transpose(2, 0, 1)  # [4, scale, scale]
    alpha = pixels[3:]
    colour = np.minimum(pixels[:3], alpha)  # Lanczos may overshoot
    return np.ascontiguousarray(colour), 255 - alpha.astype(np.uint16)


def _compose(item: EmojiItem, scale: int, left: int, top: int) -> np.ndarray:
    """uint8 [3, 64, 64] = colour * alpha + background * (1 - alpha), exact where alpha is 0 or 1."""
    if not 1 <= scale <= SIZE:
        raise ValueError(f"scale={scale} pixels, but the canvas has {SIZE}; give 1 to {SIZE}")
    if not (0 <= left <= SIZE - scale and 0 <= top <= SIZE - scale):
        raise ValueError(
            f"left={left}, top={top} moves a {scale}-pixel emoji off the {SIZE}-pixel canvas; give 0 to {SIZE - scale}"
        )
    if item.background not in BACKGROUNDS:
        raise ValueError(f"no background named {item.background!r}; choose one of {', '.join(BACKGROUNDS)}")
    colour, transparency = _premultiplied(item.name, item.style, scale)
    background = np.array(BACKGROUNDS[item.background], dtype=np.uint16)[:, None, None]
    canvas = np.empty((3, SIZE, SIZE), dtype=np.uint8)
    canvas[:] = background
    canvas[:, top : top + scale, left : left + scale] = colour + (background * transparency + 127) // 255
    return canvas
