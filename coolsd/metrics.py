"""How good images are: FID against real ones, CLIP score with their captions.

Knows pictures and captions; knows no method, target or run. A metric whose network is not on this machine says in one
sentence what to get and where to put it, and the others are measured without it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")  # whatever a file's name says; none that runs another program
PIXELS = 1 << 26  # of a real image, at most
INCEPTION = "weights-inception-2015-12-05-6726825d.pth"  # torch-fidelity's, the one that FIDs are comparable under
INCEPTION_BYTES = 80_000_000  # it has some more
INCEPTION_URL = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{INCEPTION}"


class Metric(ABC):
    """One number of a set of images. column: its name in results.json."""

    column: str

    @abstractmethod
    def missing(self) -> str | None:
        """What is not there and where to get it, in one sentence; None where the metric can be measured."""

    @abstractmethod
    def score(self, pictures: Sequence[Path], captions: Sequence[str], device: torch.device) -> float:
        """Of pictures made for these captions, one each."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Settings, and after `score` the hash of the network and what was counted, for results.json."""


class ImageMetric(Metric):
    """A number of each image, whose mean is that of the set: with an interval, and comparable image by image."""

    @abstractmethod
    def each(self, pictures: Sequence[Path], captions: Sequence[str], device: torch.device) -> list[float]:
        """One score a picture."""

    def score(self, pictures: Sequence[Path], captions: Sequence[str], device: torch.device) -> float:
        return fmean(self.each(pictures, captions, device))


def weights_hash(network: nn.Module) -> str:
    """12 hexadecimal digits over names, dtypes and bytes of a network's tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)} ".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def squares(pictures: Iterable[Path], size: int) -> Iterator[Tensor]:
    """uint8 [3, size, size]: the middle square of each picture, resized by Pillow's antialiased bicubic filter.

    Raises ValueError, naming the file, for what is no picture or has more than `PIXELS` pixels.
    """
    for path in pictures:
        try:
            with Image.open(path, formats=FORMATS) as picture:
                if picture.width * picture.height > PIXELS:
                    raise ValueError(f"{path} has {picture.width} x {picture.height} pixels, more than {PIXELS}")
                side = min(picture.size)
                left, top = (picture.width - side) // 2, (picture.height - side) // 2
                whole = picture.convert("RGB").crop((left, top, left + side, top + side))
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(f"{path} is no picture: {error}") from None
        square = whole if side == size else whole.resize((size, size), Image.Resampling.BICUBIC)
        yield torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)


class FID(Metric):
    """Frechet inception distance (arXiv 1706.08500) between all images of a method and real ones, by torchmetrics.

    Middle square, `size` pixels, PNG or what the real images are. Under torch-fidelity's Inception weights, which are
    those of the original implementation; depends on the number of images, so compare equal numbers only.
    """

    column = "fid"

    def __init__(
        self,
        real: Path,
        limit: int | None = None,
        size: int = 256,
        batch_size: int = 64,
        weights: Path | None = None,
        feature: nn.Module | None = None,
    ) -> None:
        """
        Args:
            real: Folder of real images, at any depth.
            limit: Only so many of them, the first by name.
            size: Pixels a side, before the network's own resizing.
            batch_size: Images a pass of the network.
            weights: File of the Inception network's weights; null looks into PyTorch's hub cache.
            feature: Another network, uint8 [B, 3, size, size] -> [B, D]; what comes out is no FID to compare then.
        """
        for name, value in (("size", size), ("batch_size", batch_size), ("limit", limit)):
            if value is not None and value < 1:
                raise ValueError(f"FID {name} is {value}, but must be >= 1")
        self.real, self.limit, self.size, self.batch_size, self.feature = real, limit, size, batch_size, feature
        self.weights = Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION if weights is None else weights
        self._metric: Any = None
        self._found: dict[str, Any] = {}

    def real_images(self) -> list[Path]:
        found = sorted(path for path in self.real.rglob("*") if path.suffix.lower() in PICTURES)
        return found[: self.limit]

    def reals(self) -> Iterator[Tensor]:
        """uint8 [3, size, size] each."""
        return squares(self.real_images(), self.size)

    def missing(self) -> str | None:
        if not self.real.is_dir() or len(self.real_images()) < 2:
            return f"fid: {self.real} holds fewer than 2 images; point real at a folder of real ones"
        if self.feature is None and importlib.util.find_spec("torch_fidelity") is None:
            return "fid: torch-fidelity is not installed; pip install 'coolsd[eval]'"
        if self.feature is None and not (self.weights.is_file() and self.weights.stat().st_size > INCEPTION_BYTES):
            return f"fid: Inception's weights are not at {self.weights}, or not whole; put {INCEPTION_URL} there"
        return None

    def score(self, pictures: Sequence[Path], captions: Sequence[str], device: torch.device) -> float:
        """Raises ValueError for fewer than 2 images."""
        device = torch.device("cpu") if device.type == "mps" else device  # which has no float64
        if len(pictures) < 2:
            raise ValueError(f"FID of {len(pictures)} image: a distance of distributions needs 2 at the very least")
        if self._metric is None:
            from torchmetrics.image.fid import FrechetInceptionDistance

            path: dict[str, Any] = {"feature_extractor_weights_path": str(self.weights)}
            path = path if self.feature is None else {}
            feature = 2048 if self.feature is None else self.feature.eval()
            shape = (3, self.size, self.size)
            metric = FrechetInceptionDistance(feature, reset_real_features=False, input_img_size=shape, **path)
            self._metric = metric.to(device)
            self._found = {"real_images": self._update(self.reals(), device, real=True)}
            self._found["network"] = weights_hash(metric.inception)
        self._metric.reset()
        self._found["images"] = self._update(squares(pictures, self.size), device, real=False)
        return float(self._metric.compute())

    def _update(self, images: Iterator[Tensor], device: torch.device, real: bool) -> int:
        count = 0
        with torch.inference_mode():
            while batch := list(itertools.islice(images, self.batch_size)):
                self._metric.update(torch.stack(batch).to(device), real=real)
                count += len(batch)
        return count

    def about(self) -> dict[str, Any]:
        protocol = f"middle square, Pillow bicubic, {self.size} px"
        known = "torch-fidelity's Inception" if self.feature is None else type(self.feature).__name__
        return {"protocol": protocol, "feature": known, "real": str(self.real), **self._found}


class ClipScore(ImageMetric):
    """100 max(0, cosine of the image's and the caption's embedding), the mean of all images (arXiv 2104.08718).

    On transformers' CLIP and its own processor. Captions of more than CLIP's 77 tokens are cut, and counted.
    """

    column = "clip_score"

    def __init__(self, model: str = "openai/clip-vit-base-patch32", prefix: str = "", batch_size: int = 64) -> None:
        """
        Args:
            model: Of the hub, or a folder: openai/clip-vit-base-patch32, openai/clip-vit-large-patch14, ...
            prefix: Put before each caption, as "A photo depicts" in the original definition.
            batch_size: Images a pass of the network.
        """
        if batch_size < 1:
            raise ValueError(f"ClipScore batch_size is {batch_size}, but must be >= 1")
        self.model, self.prefix, self.batch_size = model, prefix, batch_size
        self._loaded: tuple[Any, Any] | None = None
        self._found: dict[str, Any] = {}

    def missing(self) -> str | None:
        try:
            self._load()
        except Exception as error:  # a download that broke off fails in many ways
            why = f"{type(error).__name__} {error}".splitlines()[0][:120]
            return f"clip_score: {self.model} could not be loaded ({why}); download it with `hf download {self.model}`"
        return None

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            from transformers import CLIPModel, CLIPProcessor

            self._loaded = CLIPModel.from_pretrained(self.model).eval(), CLIPProcessor.from_pretrained(self.model)
        return self._loaded

    def each(self, pictures: Sequence[Path], captions: Sequence[str], device: torch.device) -> list[float]:
        network, processor = self._load()
        network.to(device)
        longest = network.config.text_config.max_position_embeddings
        scores: list[float] = []
        cut = 0
        for first in range(0, len(pictures), self.batch_size):
            images = []
            for path in pictures[first : first + self.batch_size]:
                with Image.open(path) as picture:
                    images.append(picture.convert("RGB"))
            texts = [f"{self.prefix} {caption}".strip() for caption in captions[first : first + self.batch_size]]
            cut += sum(len(ids) > longest for ids in processor.tokenizer(texts, verbose=False)["input_ids"])
            inputs = processor(
                text=texts, images=images, return_tensors="pt", padding=True, truncation=True, max_length=longest
            )
            with torch.inference_mode():
                found = network(**inputs.to(device))
            cosines = torch.cosine_similarity(found.image_embeds.float(), found.text_embeds.float(), dim=-1)
            scores += (100 * cosines.clamp(min=0)).tolist()
        self._found = {"network": weights_hash(network), "images": len(pictures), "captions_cut": cut}
        return scores

    def about(self) -> dict[str, Any]:
        return {"model": self.model, "prefix": self.prefix, **self._found}


def ready(metrics: Sequence[Metric]) -> list[Metric]:
    """Those that can be measured; of the others it prints what is missing."""
    found = []
    for metric in metrics:
        if (what := metric.missing()) is None:
            found.append(metric)
        else:
            print(what)
    return found
