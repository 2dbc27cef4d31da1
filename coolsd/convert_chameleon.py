"""Chameleon's family for `coolsd convert`: Lumina-mGPT and Anole, their image tokenizer, and LANTERN's heads for them.

Knows their config and key names; knows no decoding.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from coolsd.checkpoint import (
    INDEX,
    INDEX_BYTES,
    Shards,
    as_told,
    check_fits,
    find_folder,
    load_strictly,
    read_json,
    save_checkpoint,
    write_fingerprint,
    write_json,
)
from coolsd.heads.eagle import EagleConfig, make_head
from coolsd.heads.pairing import agreement
from coolsd.image_tokenizers import vqgan
from coolsd.published import Converted, layers_of, number, read_foreign, real
from coolsd.targets import load_target
from coolsd.targets.chameleon import (
    Chameleon,
    ChameleonConfig,
    check_codes,
    check_size,
    code_name,
    decoder_layer,
    ours,
    read_tokenizer,
    vocabulary_ids,
)
from coolsd.transformer import TransformerConfig

Layout = Literal["lumina", "anole"]
Pairing = Literal["detect", "next", "same"]
ImageSize = int | tuple[int, int] | None


def from_chameleon_drafter(
    tensors: dict[str, Tensor], config: dict[str, Any], source: Path, folder: Path | None, pairing: Pairing
) -> Converted:
    """LANTERN's head for Lumina-mGPT or Anole: it knows captions by their tokens, and normalises the first layer's
    input, queries and keys. What its files leave open its target tells: the size of images, and the pairing it was
    trained with, for with that one its drafts agree more with the target.
    """
    if folder is None:
        raise ValueError(f"{source} drafts for a Chameleon; give --target, that model's converted folder")
    own = ChameleonConfig.from_json(read_json(find_folder(folder) / "config.json"))
    heads = number({"num_attention_heads": own.transformer.heads, **config}, "num_attention_heads", source)
    key_heads = number({"num_key_value_heads": heads, **config}, "num_key_value_heads", source)
    eps = real(config, "rms_norm_eps", 1e-5, source)
    read_names: set[str] = set()

    def read(name: str) -> Tensor:
        if name not in tensors:
            raise ValueError(f"{source} lacks {name}")
        read_names.add(name)
        return tensors[name]

    embedding, fc = read("embed_tokens.weight"), read("fc.weight")
    size, gate = own.transformer.hidden_size, read("layers.0.mlp.gate_proj.weight")
    if list(embedding.shape) != [own.vocabulary, size]:
        raise ValueError(
            f"{source} has an embedding of {list(embedding.shape)}, but {folder} has {own.vocabulary} ids of width "
            f"{size}; give the target that it drafts for"
        )
    shape = TransformerConfig(
        size, layers_of(tensors), heads, gate.shape[0] if gate.ndim else 0, 0 if key_heads == heads else key_heads,
        eps, True,
    )  # fmt: skip
    embedding = embedding * max(1.0, real(config, "embed_upscale", 1, source))
    named: dict[str, Tensor] = {
        "embedding": embedding[vocabulary_ids(own)],
        "text_embedding": embedding,
        "prefix_embedding": embedding.new_zeros(size),
        "fc.weight": fc,
    }
    if bias := "fc.bias" in tensors:
        named["fc.bias"] = read("fc.bias")
    with as_told(source):
        for layer in range(shape.layers):
            named |= decoder_layer(read, f"layers.{layer}", f"transformer.layers.{layer}", shape)
    made = EagleConfig(
        shape, own.codebook_size, own.prompt_slots, own.grid[0] * own.grid[1], bias=bias, own_embedding=True,
        input_norm=True, text=own.vocabulary, pairing="next" if pairing == "detect" else pairing,
    )  # fmt: skip
    with torch.device("meta"):
        slots = own.prompt_slots + own.grid[0] * own.grid[1]
        codes, rope = torch.empty(own.codebook_size, size), torch.empty(slots, shape.head_dim // 2, 2)
        check_fits(make_head(made, {"embedding": codes, "lm_head": codes, "rope": rope}), named, source)
    report = {
        "mapped": {name: [name] for name in sorted(read_names)},
        "unused": sorted(set(tensors) - read_names),
        "missing": [],
    }
    if pairing == "detect":
        target = load_target(folder, dtype="bfloat16")
        head = make_head(made, target.ends())
        load_strictly(head, named, source)
        report["agreement"] = found = agreement(head.to(target.device, target.dtype).eval(), target)
        made = replace(made, pairing=max(found, key=lambda name: found[name]))
        print(f"{source}: agreement with the target by pairing {found}; {made.pairing!r} is recorded")
    return Converted(made.to_json(), named, report)


def from_vqgan(tensors: Mapping[str, Tensor], source: Path) -> Converted:
    """Chameleon's image tokenizer; all of its shape can be read off its tensors."""
    own = vqgan.own_tensors(tensors)
    try:
        config = vqgan.config_of(own)
        with torch.device("meta"):
            check_fits(vqgan.VQGAN(config), own, source)
    except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{source} is no VQGAN of Chameleon's: {error}") from None
    unused = sorted(name for name in tensors if name.removeprefix("model.vqmodel.") not in own)
    report = {"mapped": {name: [name] for name in own}, "unused": unused, "missing": []}
    return Converted({"type": "vqgan", **asdict(config)}, own, report)


def is_chameleon(source: Path) -> bool:
    """Whether a folder is Hugging Face's of a Chameleon; LANTERN's drafters have the same config, but no `model.`"""
    if not source.is_dir() or not ((source / INDEX).is_file() or (source / "model.safetensors").is_file()):
        return False
    return read_json(source / "config.json", INDEX_BYTES).get("model_type") == "chameleon" and (
        "fc.weight" not in Shards(source).files
    )


def write_chameleon(
    source: Path, part: Path, layout: Layout | None, image_size: ImageSize, tokenizer: Path | None
) -> dict[str, Any]:
    """Names and shapes are checked, the files linked, or copied where the disk cannot."""
    published, shards = read_json(source / "config.json", INDEX_BYTES), Shards(source)
    own = chameleon_config(published, layout, image_size, source)
    if (found := layers_of(shards.files)) != own.transformer.layers:
        raise ValueError(f"{source} has {found} layers, but its config.json tells of {own.transformer.layers}")
    if not (source / "tokenizer.json").is_file():
        raise ValueError(f"{source} has no tokenizer.json; download the model's own into it")
    known = read_tokenizer(source / "tokenizer.json", own).get_vocab()
    if isinstance(names := published.get("vocabulary_map"), dict):
        check_codes(names.get, own.codes, source / "config.json")
        known |= names
    if any(code_name(code) not in known for code in (0, own.codes - 1)):
        raise ValueError(f"{source}: neither tokenizer.json nor vocabulary_map names {own.codes} image codes")
    used: set[str] = set()

    def read(name: str) -> Tensor:
        used.add(name)
        return shards.outline(name)

    check_size(shards, own)
    with torch.device("meta"), as_told(source):
        check_fits(Chameleon(own, None), ours(read, own), source)
    files = sorted({shards.files[name] for name in used})
    for name in files:
        link(source / name, part / name)
    if (source / INDEX).is_file():
        write_json(part / INDEX, {"weight_map": {name: shards.files[name] for name in sorted(used)}})
        files.append(INDEX)
    shutil.copyfile(source / "tokenizer.json", part / "tokenizer.json")
    write_json(part / "config.json", own.to_json())
    write_fingerprint(part, ["config.json", "tokenizer.json", *files])
    pixels = [name for name in shards.files if name.startswith("model.vqmodel.")]
    if tokenizer is not None or "model.vqmodel.decoder.conv_in.weight" in pixels:
        theirs = {name: shards.read(name) for name in pixels} if tokenizer is None else read_foreign(tokenizer)
        made = from_vqgan(theirs, tokenizer or source)
        if made.config["codebook_size"] != own.codes:
            raise ValueError(
                f"{tokenizer or source} has {made.config['codebook_size']} codes, but {source} {own.codes}"
            )
        save_checkpoint(part / "image_tokenizer", made.config, made.tensors)
    unused = sorted(set(shards.files) - used)
    return {"source": source.name, "format": "chameleon", "mapped": {name: [name] for name in sorted(used)},
            "unused": unused, "missing": []}  # fmt: skip


def chameleon_config(
    published: dict[str, Any], layout: Layout | None, image_size: ImageSize, source: Path
) -> ChameleonConfig:
    """Ours of theirs. Raises ValueError for what decoding does not know, and for what their file does not say."""
    if published.get("model_type") != "chameleon":
        raise ValueError(f"{source} is no Chameleon: its config.json has model_type {published.get('model_type')!r}")
    if published.get("swin_norm"):
        raise ValueError(f"{source} normalises behind its layers (swin_norm, the 34B models); only 7B's way is known")
    if layout is None:
        raise ValueError(f"{source} does not say how its images are laid out; give --layout lumina or anole")
    rope, pixels = (published.get(name) or {} for name in ("rope_parameters", "vq_config"))
    if not (isinstance(rope, dict) and isinstance(pixels, dict)):
        raise ValueError(f"{source}/config.json: rope_parameters and vq_config must be objects")
    if published.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        raise ValueError(f"{source} scales its rotary positions, which is not known here")
    if published.get("attention_bias") or published.get("mlp_bias"):
        raise ValueError(f"{source} has biases in its layers, which is not known here")
    if layout == "lumina" and image_size is None:
        raise ValueError(f"{source} does not say how large its images are; give --image_size, 768 or [width, height]")
    size = image_size or 512
    heads = number(published, "num_attention_heads", source)
    key_heads = number({"num_key_value_heads": heads, **published}, "num_key_value_heads", source)
    shape = TransformerConfig(
        number(published, "hidden_size", source), number(published, "num_hidden_layers", source), heads,
        number(published, "intermediate_size", source), 0 if key_heads == heads else key_heads,
        real(published, "rms_norm_eps", 1e-5, source), True,
    )  # fmt: skip
    return ChameleonConfig(
        shape, layout, (size, size) if isinstance(size, int) else size,
        codes=number({"codes": pixels.get("num_embeddings") or pixels.get("n_embed") or 8192}, "codes", source),
        vocabulary=number(published, "vocab_size", source),
        rope_base=real({**rope, **{k: v for k, v in published.items() if v is not None}}, "rope_theta", 1e4, source),
    )  # fmt: skip


def link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
        return
    except OSError:  # another disk, or one without links
        pass
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise ValueError(f"{source} cannot be copied to {target} ({error.strerror})") from None
