"""Files that others published, read into tensors and configs.  Knows file formats; knows no model.

Files are hostile: pickles are read with weights_only=True, and a shard is a plain file name in its own folder.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coolsd.checkpoint import INDEX, INDEX_BYTES, read_json, read_safetensors, weight_map

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class Converted:
    """A checkpoint about to be written. report: which of their keys became ours, and which are left."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    report: dict[str, Any]


def read_foreign(path: Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors file or a pickle (.pt, .pth, .bin); a wrapper "model", "module" or "state_dict" opened.

    Raises ValueError where the file is broken, holds anything but tensors, or is something else altogether.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a pickle may be broken in any way
        why = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path} is not a whole checkpoint of tensors ({why}); download it again") from None
    for wrapper in ("model", "module", "state_dict"):
        if isinstance(found, dict) and isinstance(found.get(wrapper), dict):
            found = found[wrapper]
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{path} holds a {type(found).__name__}, not tensors by name")
    tensors = {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(f"{path} holds no tensors by name")
    return tensors


def read_source(source: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config.json (or nothing) of a file, or of a Hugging Face folder, its shards included."""
    if not source.is_dir():
        beside = source.with_name("config.json")
        return read_foreign(source), read_json(beside, INDEX_BYTES) if beside.is_file() else {}
    config = read_json(source / "config.json", INDEX_BYTES)  # Chameleon's lists its vocabulary
    for index in (INDEX, "pytorch_model.bin.index.json"):
        if (source / index).is_file():
            tensors: dict[str, Tensor] = {}
            for shard in sorted(set(weight_map(source / index).values())):
                tensors |= read_foreign(source / shard)
            return tensors, config
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (source / name).is_file():
            return read_foreign(source / name), config
    raise FileNotFoundError(f"{source} has neither model.safetensors nor pytorch_model.bin")


def layers_of(tensors: Collection[str], layer: re.Pattern[str] = LAYER) -> int:
    """Raises ValueError where a name has a number that so few tensors cannot have counted up to."""
    numbers = (found[1] for name in tensors if (found := layer.search(name)))
    last = max((int(number[:10]) for number in numbers), default=-1)
    if last >= len(tensors):
        raise ValueError(f"a tensor is of layer {last}, but there are only {len(tensors)} tensors")
    return last + 1


def number(config: Mapping[str, Any], name: str, source: Path) -> int:
    value = config.get(name)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise ValueError(f"{source}: config.json has {name} = {value!r}, but must have a positive integer")
    return value


def real(config: Mapping[str, Any], name: str, default: float, source: Path) -> float:
    """A positive number, `default` where the config has none or null."""
    value = default if config.get(name) is None else config[name]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{source}: config.json has {name} = {value!r}, but must have a positive number")
    return float(value)
