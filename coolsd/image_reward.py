"""ImageReward (Xu et al. 2023, 2304.05977): how much people would prefer an image for its caption, on BLIP's blocks.

Knows the network, the published file's key names and how it is asked; knows no run. `coolsd convert ImageReward.pt`
makes the folder that the metric reads.

    image 224 px -> ViT -> 197 states, attended by each layer of
    caption, 35 word pieces -> BERT -> state of [CLS] -> MLP -> (r - MEAN) / SD
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from coolsd.checkpoint import check_fits, fingerprint, load_made, read_json, read_tensors
from coolsd.metrics import ImageMetric
from coolsd.published import layers_of
from coolsd.transformer import MOST_LAYERS

MEAN, SD = 0.16717362830052426, 1.0333394966054072  # of the published network's own outputs on its authors' data
PIECES = 35  # word pieces of a caption, at most
WIDTHS = (1024, 128, 64, 16, 1)  # of the MLP
FILE = "https://huggingface.co/zai-org/ImageReward/resolve/main/ImageReward.pt"
# their names, rewritten one rule after another -> ours, which are those of transformers' modules
RULES = (
    (r"^blip\.visual_encoder\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^blip\.visual_encoder\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^blip\.visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^blip\.visual_encoder\.norm\.", "vision.post_layernorm."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.proj\.", r"vision.encoder.layers.\1.self_attn.projection."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.", r"vision.encoder.layers.\1.self_attn."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.norm(\d)\.", r"vision.encoder.layers.\1.layer_norm\2."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.mlp\.", r"vision.encoder.layers.\1.mlp."),
    (r"^blip\.text_encoder\.", "text."),
    (r"^mlp\.layers\.(\d+)\.", lambda found: f"mlp.{int(found[1]) // 2 if int(found[1]) < 7 else 4}."),
)


@dataclass(frozen=True)
class ImageRewardConfig:
    """Shape of the network; the defaults are the published one's. Heads are 64 wide."""

    image_size: int = 224
    patch_size: int = 16
    vision_size: int = 1024
    vision_layers: int = 24
    vision_intermediate: int = 4096
    text_size: int = 768
    text_layers: int = 12
    text_intermediate: int = 3072
    word_pieces: int = 30524
    positions: int = 512

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            most = MOST_LAYERS if name.endswith("layers") else 1 << 24
            if type(number) is not int or not 0 < number <= most:
                raise ValueError(f"ImageReward config: {name} is {number!r}, but must be an integer from 1 to {most}")


class ImageRewardNetwork(nn.Module):
    def __init__(self, config: ImageRewardConfig) -> None:
        super().__init__()
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        self.config = config
        self.vision = BlipVisionModel(
            BlipVisionConfig(
                hidden_size=config.vision_size,
                intermediate_size=config.vision_intermediate,
                num_hidden_layers=config.vision_layers,
                num_attention_heads=config.vision_size // 64,
                image_size=config.image_size,
                patch_size=config.patch_size,
                layer_norm_eps=1e-6,
            )
        )
        self.text = BlipTextModel(
            BlipTextConfig(
                vocab_size=config.word_pieces,
                hidden_size=config.text_size,
                encoder_hidden_size=config.vision_size,
                intermediate_size=config.text_intermediate,
                num_hidden_layers=config.text_layers,
                num_attention_heads=config.text_size // 64,
                max_position_embeddings=config.positions,
            ),
            add_pooling_layer=False,
        )
        self.mlp = nn.ModuleList(
            nn.Linear(before, after) for before, after in zip((config.text_size, *WIDTHS), WIDTHS, strict=False)
        )

    def forward(self, pixels: Tensor, pieces: Tensor, mask: Tensor) -> Tensor:
        """pixels float [B, 3, h, w], normalised as CLIP's; pieces and mask long [B, N] -> rewards float [B]."""
        seen = self.vision(pixel_values=pixels).last_hidden_state
        everywhere = torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device)
        x = self.text(
            input_ids=pieces, attention_mask=mask, encoder_hidden_states=seen, encoder_attention_mask=everywhere
        ).last_hidden_state[:, 0]
        for linear in self.mlp:  # with nothing but dropout between them
            x = linear(x)
        return (x[:, 0] - MEAN) / SD


def our_names(names: Sequence[str]) -> dict[str, str]:
    """Their name -> ours, of those that we have a place for."""
    found = {}
    for name in names:
        for pattern, ours in RULES:
            if re.search(pattern, name) and not name.endswith("position_ids"):
                found[name] = re.sub(pattern, ours, name)  # type: ignore[call-overload]
                break
    return found


def from_published(tensors: Mapping[str, Tensor], source: Path) -> tuple[ImageRewardConfig, dict[str, Tensor]]:
    """Config, read off the shapes, and tensors by our names. Raises ValueError where they do not make the network."""
    ours = {name: tensors[theirs] for theirs, name in our_names(list(tensors)).items()}

    try:
        patches = ours["vision.embeddings.patch_embedding.weight"]
        side = round((ours["vision.embeddings.position_embedding"].shape[1] - 1) ** 0.5)
        words = ours["text.embeddings.word_embeddings.weight"]
        config = ImageRewardConfig(
            image_size=side * patches.shape[-1],
            patch_size=patches.shape[-1],
            vision_size=len(patches),
            vision_layers=layers_of(ours, re.compile(r"^vision\.encoder\.layers\.(\d+)\.")),
            vision_intermediate=len(ours["vision.encoder.layers.0.mlp.fc1.weight"]),
            text_size=words.shape[1],
            text_layers=layers_of(ours, re.compile(r"^text\.encoder\.layer\.(\d+)\.")),
            text_intermediate=len(ours["text.encoder.layer.0.intermediate.dense.weight"]),
            word_pieces=len(words),
            positions=len(ours["text.embeddings.position_embeddings.weight"]),
        )
    except KeyError as error:
        raise ValueError(f"{source} is no ImageReward network: it lacks {error}") from None
    with torch.device("meta"):
        check_fits(ImageRewardNetwork(config), ours, source)
    return config, ours


class ImageReward(ImageMetric):
    """Mean reward of images and their captions; 0 is the mean and 1 the standard deviation of its authors' data."""

    column = "image_reward"

    def __init__(
        self, folder: Path = Path("models/image-reward"), words: str = "bert-base-uncased", batch_size: int = 32
    ) -> None:
        """
        Args:
            folder: What `coolsd convert ImageReward.pt --out FOLDER` made.
            words: BERT's word pieces, of the hub or a folder.
            batch_size: Images a pass of the network.
        """
        if batch_size < 1:
            raise ValueError(f"ImageReward batch_size is {batch_size}, but must be >= 1")
        self.folder, self.words, self.batch_size = folder, words, batch_size
        self._loaded: tuple[Any, ImageRewardNetwork] | None = None
        self._found: dict[str, Any] = {}

    def missing(self) -> str | None:
        if not (self.folder / "config.json").is_file():
            return (
                f"image_reward: nothing at {self.folder}; download {FILE} and run coolsd convert ImageReward.pt --out "
                f"{self.folder}"
            )
        try:
            self._load()
        except Exception as error:  # a download that broke off fails in many ways
            why = f"{type(error).__name__} {error}".splitlines()[0][:120]
            return (
                f"image_reward: {self.folder} or {self.words} could not be loaded ({why}); convert {FILE} again, or "
                f"`hf download {self.words}`"
            )
        return None

    def _load(self) -> tuple[Any, ImageRewardNetwork]:
        if self._loaded is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.words)
            about = {name: value for name, value in read_json(self.folder / "config.json").items() if name != "type"}
            config = ImageRewardConfig(**about)
            network = load_made(lambda: ImageRewardNetwork(config), read_tensors(self.folder), self.folder)
            self._found["network"] = fingerprint(self.folder)
            self._loaded = tokenizer, network.float().eval()
        return self._loaded

    def each(self, pictures: Sequence[Path], captions: Sequence[str], device: torch.device) -> list[float]:
        from transformers import CLIPImageProcessor

        tokenizer, network = self._load()
        network.to(device)
        side = network.config.image_size
        processor = CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
        rewards: list[float] = []
        for first in range(0, len(pictures), self.batch_size):
            images = []
            for path in pictures[first : first + self.batch_size]:
                with Image.open(path) as picture:
                    images.append(picture.convert("RGB"))
            words = list(captions[first : first + self.batch_size])
            asked = tokenizer(words, padding="max_length", truncation=True, max_length=PIECES, return_tensors="pt")
            pixels = processor(images=images, return_tensors="pt")["pixel_values"]
            with torch.inference_mode():
                arguments = (pixels, asked["input_ids"], asked["attention_mask"])
                rewards += network(*(x.to(device) for x in arguments)).flatten().tolist()
        self._found["images"] = len(pictures)
        return rewards

    def about(self) -> dict[str, Any]:
        return {"scale": "mean 0, sd 1 of its authors' data", "words": self.words, **self._found}
