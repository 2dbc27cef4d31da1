"""Draft heads as checkpoint folders, refused where they belong to another target."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from coolsd.checkpoint import (
    find_folder,
    fingerprint,
    load_strictly,
    read_json,
    read_tensors,
    same_weights,
    save_checkpoint,
)
from coolsd.heads.eagle import EagleConfig, EagleHead


def load_head(folder: str | Path, target: Any, verify: bool = False, compile: bool = False) -> EagleHead:
    """Load a draft head for `target`, to decode with: frozen, on its device and in its dtype.

    Raises ValueError where the head was trained on another target or its shapes do not fit. A converted head has no
    target fingerprint: shapes are checked, and one warning says so.
    """
    head = read_head(folder, target.ends(), target.fingerprint, verify)
    head = head.to(target.device, target.dtype).eval().requires_grad_(False).prepare(pack=not compile)
    if compile:
        head.transformer.compile(dynamic=False)
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
    head = EagleHead(own, ends["embedding"], ends["lm_head"], ends["rope"])
    load_strictly(head, read_tensors(path), path / "model.safetensors")
    return head


def save_head(head: EagleHead, folder: Path) -> str:
    """Write a head's own parameters (not the target's ends); returns the checkpoint's fingerprint."""
    return save_checkpoint(folder, head.config.to_json(), head.state_dict())
