"""Draft heads as checkpoint folders, refused where they belong to another target."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from coolsd.checkpoint import (
    find_folder,
    fingerprint,
    load_made,
    read_json,
    read_tensors,
    same_weights,
    save_checkpoint,
)
from coolsd.heads.eagle import EagleConfig, EagleHead, make_head


def load_head(folder: str | Path, target: Any, verify: bool = False, compile: bool = False) -> EagleHead:
    """Load a draft head for `target`, to decode with: frozen, on its device and in its dtype.

    Raises ValueError where the head was trained on another target or its shapes do not fit. A converted head has no
    target fingerprint: shapes are checked, and one warning says so.
    """
    head = read_head(folder, target.ends(), target.fingerprint, verify)
    show_layers(target, head.config.layers)
    head = head.to(target.device, target.dtype).eval().requires_grad_(False).prepare()
    if compile:
        head.transformer.compile_shapes()
    return head


def read_head(folder: str | Path, ends: Mapping[str, Tensor], target: str, verify: bool = False) -> EagleHead:
    """The same from the target's `ends()` and its fingerprint alone, still to be trained."""
    path = find_folder(folder)
    config = read_json(path / "config.json")
    if config.get("architecture") != "eagle":
        raise ValueError(
            f"{path}/config.json has architecture {config.get('architecture')!r}; a draft head has 'eagle'"
        )
    own = EagleConfig.from_json(config)
    fingerprint(path, verify)
    if own.target is None:
        warnings.warn(f"{path} does not say which target it was trained for; only shapes were checked", stacklevel=3)
    elif not same_weights(own.target, target):
        raise ValueError(
            f"head {path} was trained on {own.target}, but the target is {target}; "
            f"pass a head trained for it, or extract and fit again"
        )
    return load_made(lambda: make_head(own, ends), read_tensors(path), path / "model.safetensors")


def save_head(head: EagleHead, folder: Path, state: Mapping[str, Tensor] | None = None) -> str:
    """Write a head's own parameters (not the target's ends), or `state`; returns the checkpoint's fingerprint."""
    return save_checkpoint(folder, head.config.to_json(), head.state_dict() if state is None else state)


def show_layers(target: Any, layers: Sequence[int]) -> None:
    """From now on the target's outputs have these layers, too. Raises ValueError where it has no such layer."""
    if layers and not all(1 <= layer <= target.layer_count for layer in layers):
        raise ValueError(f"layers are {list(layers)}, but {target.fingerprint} has layers 1 to {target.layer_count}")
    target.layers = tuple(sorted({*target.layers, *layers}))
