"""`coolsd captions`: T5 features of captions, made once and kept in the target's folder.

Knows prompts and the text encoder; the target itself is not loaded. Where all captions are kept, decoding and
extraction load no T5, which is larger than many targets.
"""

from __future__ import annotations

from pathlib import Path

from coolsd.checkpoint import find_folder, read_json
from coolsd.cli import argument_parser, call
from coolsd.generate_images import progress_bar, read_prompts
from coolsd.targets import pick_device
from coolsd.targets.captions import T5Encoder
from coolsd.targets.llamagen import LlamaGenConfig


def encode_captions(target: Path, prompts: Path, device: str = "auto") -> None:
    """Encode a file of captions in bfloat16, as LANTERN; those that are kept already are not encoded again.

    Args:
        target: Checkpoint folder of a LlamaGen target, or its name under checkpoints/; features go to captions/ in it.
        prompts: File with one caption a line.
        device: Of the text encoder: cpu, cuda, mps or auto.
    """
    folder = find_folder(target)
    config = read_json(folder / "config.json")
    if config.get("architecture") != "llamagen" or config.get("words") or config.get("classes"):
        raise ValueError(f"{folder} is not prompted through T5, so there is nothing to encode")
    own = LlamaGenConfig.from_json(config)
    encoder = T5Encoder(own.text_encoder, folder / "captions", pick_device(device))
    captions = read_prompts(prompts)
    with progress_bar("captions", len(captions), "encoded") as bar:
        for count, caption in enumerate(captions, start=1):
            encoder([caption], own.prompt_slots)
            bar.update(bar.task_ids[0], advance=1, rate=str(count))
    print(f"{folder / 'captions'}: {len(captions)} captions")


def main(args: list[str]) -> None:
    call(encode_captions, argument_parser("captions", "T5 features of captions, kept in the target's folder."), args)
