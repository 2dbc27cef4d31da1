"""Targets by the `architecture` their config.json names."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from coolsd.checkpoint import INDEX_BYTES, find_folder, fingerprint, read_json
from coolsd.transformer import bfloat16_on_cpu, freeze

ARCHITECTURES = {
    "llamagen": "coolsd.targets.llamagen:LlamaGen",
    "chameleon": "coolsd.targets.chameleon:Chameleon",
}


def pick_device(device: str = "auto") -> torch.device:
    if device != "auto":
        try:
            place = torch.device(device)
        except RuntimeError:
            raise ValueError(f"device {device!r} is unknown; choose auto, cpu, cuda, cuda:N or mps") from None
        backends = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        if not backends.get(place.type):
            raise ValueError(f"device {device!r} is not available here; choose auto or cpu")
        if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device {device!r}, but there are {torch.cuda.device_count()} CUDA devices")
        return place
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """ "auto" = bfloat16 where the hardware multiplies it itself, else float32: there bfloat16 makes a small model up
    to twice as slow, and only one whose weights exceed the processor's cache by far gains from half the bytes."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        native = bfloat16_on_cpu() if device.type == "cpu" else device.type == "cuda"
        return torch.bfloat16 if native else torch.float32
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in names:
        raise ValueError(f"dtype {dtype!r} is unknown; choose auto, {', '.join(names)}")
    return names[dtype]


def free_memory(device: torch.device) -> int:
    """Bytes that may be taken: on CUDA also what PyTorch holds unused, on CPU what Linux calls available, else the free
    pages, or all of them (macOS), or 8 GB where no one says (Windows)."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    try:
        if found := re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE):
            return 1024 * int(found[1])
    except OSError:
        pass  # not Linux
    if not hasattr(os, "sysconf"):  # Windows
        return 1 << 33
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def load_target(
    folder: str | Path,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    compile: bool = False,
    verify: bool = False,
) -> Any:
    """Load a target from a checkpoint folder, or by its name under checkpoints/.

    Its image tokenizer is looked for at <folder>/image_tokenizer, then at <folder>/../tokenizer. verify rehashes files.
    Raises FileNotFoundError or ValueError, naming the file, where something is missing or does not fit.
    """
    path = find_folder(folder)
    config = read_json(path / "config.json", INDEX_BYTES)
    name = config.get("architecture")
    if name not in ARCHITECTURES:
        published = "; a published model becomes a target by coolsd convert" if "model_type" in config else ""
        raise ValueError(f"{path}/config.json has architecture {name!r}; known: {', '.join(ARCHITECTURES)}{published}")
    module, _, attribute = ARCHITECTURES[name].partition(":")
    made = fingerprint(path, verify)
    target = getattr(import_module(module), attribute).load(path, config)
    target.fingerprint = f"{path.resolve().name}@{made}"
    place = pick_device(device)
    target = target.to(place, pick_dtype(dtype, place)).eval().requires_grad_(False)
    for candidate in (path / "image_tokenizer", path.parent / "tokenizer"):
        if (candidate / "config.json").is_file():
            from coolsd.image_tokenizers import load_image_tokenizer

            made_for = load_image_tokenizer(candidate, place, torch.float32)
            codes, expected = len(made_for.raw_codebook()), getattr(target.layout, "codes", target.codebook_size)
            if codes != expected:
                raise ValueError(f"{candidate} has {codes} codes, but {path} has {expected}; put its own there")
            object.__setattr__(target, "image_tokenizer", made_for)
            break
    freeze(target)
    if compile:
        target.transformer.compile_shapes()
    return target
