"""Image tokenizers: pixels to token ids and back."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from coolsd.checkpoint import find_folder, fingerprint, load_made, read_json, read_tensors
from coolsd.image_tokenizers.llamagen_vq import LlamaGenVQ, LlamaGenVQConfig
from coolsd.image_tokenizers.vqgan import VQGAN, VQGANConfig

__all__ = ["VQGAN", "LlamaGenVQ", "LlamaGenVQConfig", "VQGANConfig", "load_image_tokenizer"]

TYPES: dict[str, tuple[type, type]] = {"llamagen_vq": (LlamaGenVQ, LlamaGenVQConfig), "vqgan": (VQGAN, VQGANConfig)}


def load_image_tokenizer(
    folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """From a checkpoint folder, or a name under checkpoints/ such as "emoji/tokenizer"."""
    folder = find_folder(folder)
    path = folder / "config.json"
    config = read_json(path)
    if (kind := str(config.pop("type", None))) not in TYPES:
        raise ValueError(f"{path} has type {kind}, but an image tokenizer's is one of {', '.join(TYPES)}")
    model, shape = TYPES[kind]
    names = {field.name for field in fields(shape)}
    if config.keys() != names:
        raise ValueError(f"{path}: missing {sorted(names - config.keys())}, unknown {sorted(config.keys() - names)}")
    made, hashed = shape(**config), fingerprint(folder)
    tokenizer: Any = load_made(lambda: model(made), read_tensors(folder), folder / "model.safetensors")
    tokenizer.fingerprint = f"{folder.resolve().name}@{hashed}"
    return tokenizer.to(device=device, dtype=dtype).eval().requires_grad_(False)
