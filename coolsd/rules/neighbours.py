"""Which codes look alike: the nearest codes of each code of an image tokenizer, kept on disk beside the checkpoint.

Knows codebooks and files; knows no distribution and no rule.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from coolsd.checkpoint import write_whole

CHUNK = 1 << 22  # numbers in the largest temporary tensor
_KEPT: dict[tuple[Any, ...], Tensor] = {}
_DIGESTS = WeakTensorKeyDictionary()  # tensor -> (its version, its digest)


def keep(key: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
    """make(), or what it gave for the same key before; the last four are kept. `generate` binds its rule each time."""
    if key not in _KEPT:
        made = make()
        while len(_KEPT) >= 4:
            _KEPT.pop(next(iter(_KEPT)))
        _KEPT[key] = made
    return _KEPT[key]


def digest(table: Tensor) -> str:
    """12 hexadecimal digits that name the numbers and the shape of a tensor; computed once, while it stays as it is."""
    version = None if table.is_inference() else table._version
    known = _DIGESTS.get(table) if version is not None else None
    if known is not None and known[0] == version:
        return known[1]
    numbers = table.detach().float().cpu().contiguous().numpy().tobytes()
    found = hashlib.sha256(f"{list(table.shape)}".encode() + numbers).hexdigest()[:12]
    if version is not None:
        _DIGESTS[table] = version, found
    return found


def nearest(codebook: Tensor, count: int) -> Tensor:
    """codebook [V, D] -> int32 [V, count], on CPU: the other codes by Euclidean distance, nearest first.

    Exact (float64 differences, not the expanded square); codes at equal distance stand in the order of their numbers.
    """
    codes = codebook.detach().cpu().double()
    rows = max(1, CHUNK // len(codes))
    table = torch.empty(len(codes), count, dtype=torch.int32)
    for first in range(0, len(codes), rows):
        distance = torch.cdist(codes[first : first + rows], codes, compute_mode="donot_use_mm_for_euclid_dist")
        distance.diagonal(first).fill_(math.inf)  # a code is not its own neighbour
        last = distance.kthvalue(count, dim=-1, keepdim=True).values
        nearer, tied = distance < last, distance == last
        chosen = nearer | (tied & (tied.cumsum(-1) <= count - nearer.sum(-1, keepdim=True)))
        found = chosen.nonzero()[:, 1].unflatten(0, (-1, count))  # by number; sorting these alone is 4 times as fast
        order = distance.gather(-1, found).argsort(dim=-1, stable=True)
        table[first : first + rows] = found.gather(-1, order)
    return table


def neighbours(codebook: Tensor, count: int, folder: Path | None) -> Tensor:
    """`nearest` on the codebook's device: from memory, or from the file in `folder`, or made, and written there.

    The file is neighbours-HASH.safetensors, "nearest" int16 or int32 [V, >= count], HASH = `digest` of the codebook.
    A folder that cannot be written is a warning. Raises ValueError where the file holds something else.
    """
    name = digest(codebook)
    path = None if folder is None else folder / f"neighbours-{name}.safetensors"
    return keep((name, count, codebook.device), lambda: _find(codebook, count, path).to(codebook.device))


def _find(codebook: Tensor, count: int, path: Path | None) -> Tensor:
    if path is not None and path.is_file():
        table = _read(path, len(codebook))
        if table.shape[1] >= count:
            return table[:, :count].int()
    table = nearest(codebook, count)
    if path is not None:
        small = table.to(torch.int16) if len(codebook) <= 1 << 15 else table
        try:
            write_whole(path, lambda part: save_file({"nearest": small}, part))
        except OSError as error:
            warnings.warn(f"{path} cannot be written ({error.strerror}); every run computes it anew", stacklevel=2)
    return table


def _read(path: Path, codes: int) -> Tensor:
    try:
        table = load_file(path)["nearest"]
        if table.dtype not in (torch.int16, torch.int32) or table.ndim != 2 or len(table) != codes:
            raise ValueError(f"{table.dtype} {list(table.shape)} for {codes} codes")
        if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < codes:
            raise ValueError("a number that is no code")
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a table of neighbours ({error}); delete it, it is made anew") from None
    return table
