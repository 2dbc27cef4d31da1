"""Image tokenizers: pixels to token ids and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from coolsd.checkpoint import find_folder, fingerprint, read_json
from coolsd.image_tokenizers import llamagen_vq
from coolsd.image_tokenizers.llamagen_vq import LlamaGenVQ, LlamaGenVQConfig
from coolsd.image_tokenizers.vqgan import VQGAN, VQGANConfig

__all__ = ["VQGAN", "LlamaGenVQ", "LlamaGenVQConfig", "VQGANConfig", "load_image_tokenizer"]


def load_image_tokenizer(
    folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """From a checkpoint folder, or a name under checkpoints/ such as "emoji/tokenizer"."""
    folder = find_folder(folder)
    config = read_json(folder / "config.json")
    if config.pop("type", None) != "vqgan":
        return llamagen_vq.load_image_tokenizer(folder, device, dtype)
    made = fingerprint(folder)
    model = VQGAN.load(folder, config)
    model.fingerprint = f"{folder.resolve().name}@{made}"
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)
