"""`coolsd convert`: published checkpoints -> our folders, and back.

Knows other people's key names, shapes and file formats; knows no decoding. Files are hostile: pickles are read with
weights_only=True, everything is checked before the first byte is written, and a folder appears whole or not at all.

    llamagen            LlamaGen's .pt files: transformers (t2i_*, c2i_*) and image tokenizers (vq_*)
    lantern-llamagen    LANTERN's Hugging Face folders of the same transformers
    lantern-drafter     EAGLE-style draft heads: LANTERN's, and EAGLE's own, which have the same names
    chameleon           Hugging Face folders of Lumina-mGPT and Anole; their safetensors are linked, not rewritten
    vqgan               their image tokenizer: Meta's vqgan.ckpt, or what such a folder holds of it
    image-reward        ImageReward.pt, a metric's network (coolsd.image_reward)
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from coolsd.checkpoint import (
    Shards,
    check_fits,
    find_folder,
    read_json,
    read_tensors,
    save_checkpoint,
    write_json,
)
from coolsd.cli import argument_parser, call
from coolsd.convert_chameleon import (
    ImageSize,
    Layout,
    Pairing,
    from_chameleon_drafter,
    from_vqgan,
    is_chameleon,
    write_chameleon,
)
from coolsd.heads.eagle import EagleConfig
from coolsd.image_reward import from_published, our_names
from coolsd.image_tokenizers.llamagen_vq import LlamaGenVQ, LlamaGenVQConfig
from coolsd.image_tokenizers.vqgan import own_tensors
from coolsd.published import Converted, layers_of, number, read_foreign, read_source, real
from coolsd.targets.llamagen import LlamaGenConfig
from coolsd.transformer import TransformerConfig

Names = Mapping[str, Sequence[str]]  # our name -> their names, whose tensors ours holds one below the other
Format = Literal["llamagen", "lantern-llamagen", "lantern-drafter", "eagle"]  # that can be written, too
HEADS = {(768, 12): 12, (1024, 16): 16, (1280, 36): 20, (1536, 48): 24, (3200, 24): 32}  # B, L, XL, XXL, 3B
DRAFTER_GRIDS = {"t2i": (16, 16), "t2i2": (32, 32), "c2i": (24, 24)}  # LANTERN's input_type -> what its code builds

LLAMAGEN: Names = {
    "embedding.weight": ["tok_embeddings.weight"],
    "class_embedding.weight": ["cls_embedding.embedding_table.weight"],
    "caption_projection.fc1.weight": ["cls_embedding.cap_proj.fc1.weight"],
    "caption_projection.fc2.weight": ["cls_embedding.cap_proj.fc2.weight"],
    "null_caption": ["cls_embedding.uncond_embedding"],
    "transformer.norm.weight": ["norm.weight"],
    "lm_head.weight": ["output.weight"],
    "transformer.layers.*.attention.qkv.weight": ["layers.*.attention.wqkv.weight"],
    "transformer.layers.*.attention.output.weight": ["layers.*.attention.wo.weight"],
    "transformer.layers.*.feed_forward.gate_up.weight": [f"layers.*.feed_forward.{w}.weight" for w in ("w1", "w3")],
    "transformer.layers.*.feed_forward.down.weight": ["layers.*.feed_forward.w2.weight"],
    "transformer.layers.*.attention_norm.weight": ["layers.*.attention_norm.weight"],
    "transformer.layers.*.feed_forward_norm.weight": ["layers.*.ffn_norm.weight"],
}
HUGGING_FACE_LAYERS: Names = {
    "transformer.layers.*.attention.qkv.weight": [f"layers.*.self_attn.{name}_proj.weight" for name in "qkv"],
    "transformer.layers.*.attention.output.weight": ["layers.*.self_attn.o_proj.weight"],
    "transformer.layers.*.feed_forward.gate_up.weight": [f"layers.*.mlp.{name}_proj.weight" for name in ("gate", "up")],
    "transformer.layers.*.feed_forward.down.weight": ["layers.*.mlp.down_proj.weight"],
    "transformer.layers.*.attention_norm.weight": ["layers.*.input_layernorm.weight"],
    "transformer.layers.*.feed_forward_norm.weight": ["layers.*.post_attention_layernorm.weight"],
}
LANTERN: Names = {
    **{ours: [f"model.{name}" for name in theirs] for ours, theirs in HUGGING_FACE_LAYERS.items()},
    **{ours: [f"model.{name}" for name in LLAMAGEN[ours]] for ours in LLAMAGEN if "cls_embedding" in LLAMAGEN[ours][0]},
    "embedding.weight": ["model.embed_tokens.weight"],
    "transformer.norm.weight": ["model.norm.weight"],
    "lm_head.weight": ["lm_head.weight"],
}
DRAFTER: Names = {
    **HUGGING_FACE_LAYERS,
    "embedding": ["embed_tokens.weight"],
    "fc.weight": ["fc.weight"],
    "fc.bias": ["fc.bias"],
}
NAMES = {"llamagen": LLAMAGEN, "lantern-llamagen": LANTERN, "lantern-drafter": DRAFTER, "eagle": DRAFTER}
FORMATS = (*NAMES, "image-reward", "chameleon", "vqgan")


# ------------------------------------------------------------------------------------------------- reading


def detect(tensors: Mapping[str, Tensor], source: Path) -> str:
    """Which of the known formats these key names are."""
    if "encoder.down.0.block.0.conv1.weight" in own_tensors(tensors):
        return "vqgan"
    if "quantize.embedding.weight" in tensors or "tok_embeddings.weight" in tensors:
        return "llamagen"
    if "model.cls_embedding.uncond_embedding" in tensors:
        return "lantern-llamagen"
    if "fc.weight" in tensors:
        return "lantern-drafter"
    if "blip.visual_encoder.cls_token" in tensors:
        return "image-reward"
    some = ", ".join(sorted(tensors)[:3])
    raise ValueError(f"{source} is of no known format: it has {some}, ...; known are {', '.join(FORMATS)}")


# ---------------------------------------------------------------------------------------------- key by key


def expand(names: Names, layers: int) -> dict[str, list[str]]:
    """The pattern * written out for every layer."""
    found: dict[str, list[str]] = {}
    for ours, theirs in names.items():
        for layer in range(layers) if "*" in ours else [0]:
            found[ours.replace("*", str(layer))] = [name.replace("*", str(layer)) for name in theirs]
    return found


def to_ours(tensors: Mapping[str, Tensor], names: Names, optional: Callable[[str], bool], source: Path) -> Converted:
    """Rename and join. Raises ValueError naming every missing key that is not optional."""
    mapped: dict[str, list[str]] = {}
    missing: list[str] = []
    ours: dict[str, Tensor] = {}
    for name, parts in expand(names, layers_of(tensors)).items():
        absent = [part for part in parts if part not in tensors]
        if absent:
            missing += [] if optional(name) and len(absent) == len(parts) else absent
            continue
        shapes = {tuple(tensors[part].shape[1:]) for part in parts}
        if len(shapes) > 1:
            raise ValueError(f"{source}: {' and '.join(parts)} have different widths, {sorted(shapes)}")
        mapped[name] = parts
        ours[name] = torch.cat([tensors[part] for part in parts]) if len(parts) > 1 else tensors[parts[0]]
    if missing:
        more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
        raise ValueError(f"{source} lacks {', '.join(missing[:6])}{more}")
    used = {part for parts in mapped.values() for part in parts}
    unused = sorted(name for name in tensors if name not in used)
    return Converted({}, ours, {"mapped": mapped, "unused": unused, "missing": missing})


def to_theirs(tensors: Mapping[str, Tensor], names: Names, config: TransformerConfig) -> dict[str, Tensor]:
    """The way back: split what was joined. Tensors that they have no name for are left out."""
    key_rows = config.key_heads * config.head_dim
    theirs = {}
    for ours, parts in expand(names, config.layers).items():
        if ours in tensors:
            whole = tensors[ours]
            equal = [len(whole) // len(parts)] * len(parts)
            sizes = [config.hidden_size, key_rows, key_rows] if len(parts) == 3 else equal
            for part, piece in zip(parts, whole.split(sizes), strict=True):
                theirs[part] = piece.clone()
    return theirs


# ------------------------------------------------------------------------------------- families, into ours


def transformer_config(found: Converted, heads: int, key_heads: int, eps: float, source: Path) -> TransformerConfig:
    size = found.tensors["transformer.layers.0.attention.output.weight"].shape[0]
    width = found.tensors["transformer.layers.0.feed_forward.down.weight"].shape[1]
    qkv = found.tensors["transformer.layers.0.attention.qkv.weight"].shape[0]
    layers = layers_of(found.tensors)
    config = TransformerConfig(size, layers, heads, width, 0 if key_heads == heads else key_heads, eps)
    if qkv != (heads + 2 * config.key_heads) * config.head_dim:
        raise ValueError(
            f"{source}: {heads} heads and {config.key_heads} key heads of {config.head_dim} make "
            f"{(heads + 2 * config.key_heads) * config.head_dim} rows of queries, keys and values, but it has {qkv}"
        )
    return config


def llamagen_target(found: Converted, shape: TransformerConfig, grid: tuple[int, int]) -> Converted:
    tensors = found.tensors
    classes = len(tensors["class_embedding.weight"]) - 1 if "class_embedding.weight" in tensors else 0
    slots, width = (1, 0) if classes else tensors["null_caption"].shape
    config = LlamaGenConfig(shape, len(tensors["embedding.weight"]), grid, slots, width, classes=classes)
    return replace(found, config={"architecture": "llamagen", **asdict(config)})


def from_llamagen(tensors: dict[str, Tensor], source: Path, image_size: int | None, heads: int | None) -> Converted:
    """An official transformer. Neither its heads nor its grid stand in the file: known sizes, else options."""
    captions = "cls_embedding.uncond_embedding" in tensors
    skip = "class_embedding" if captions else ("caption_projection", "null_caption")
    found = to_ours(tensors, LLAMAGEN, lambda name: name.startswith(skip), source)
    size, layers = found.tensors["embedding.weight"].shape[1], layers_of(found.tensors)
    if heads is None and (heads := HEADS.get((size, layers))) is None:
        raise ValueError(f"{source} has {layers} layers of width {size}, no published size; give its --heads")
    if image_size is None:
        raise ValueError(
            f"{source} does not say how large its images are; give --image_size: 256 for stage 1 and the c2i models "
            "of 256, 384, or 512 for stage 2"
        )
    if image_size < 16 or image_size % 16:
        raise ValueError(f"image_size is {image_size}, but must be a multiple of 16, the pixels of a token")
    side = image_size // 16
    return llamagen_target(found, transformer_config(found, heads, heads, 1e-5, source), (side, side))


def from_lantern(tensors: dict[str, Tensor], config: dict[str, Any], source: Path) -> Converted:
    found = to_ours(tensors, LANTERN, lambda name: name.startswith("class_embedding"), source)
    heads, key_heads = (number(config, name, source) for name in ("num_attention_heads", "num_key_value_heads"))
    shape = transformer_config(found, heads, key_heads, real(config, "rms_norm_eps", 1e-5, source), source)
    side = round(number(config, "block_size", source) ** 0.5)
    if side * side != config["block_size"]:
        raise ValueError(f"{source}/config.json: block_size {config['block_size']} is not a square of tokens")
    return llamagen_target(found, shape, (side, side))


def from_drafter(tensors: dict[str, Tensor], config: dict[str, Any], source: Path, heads: int | None) -> Converted:
    """A published head. Its caption slots carry token 0, so our prefix embedding is that row; it attends padding."""
    bias = "fc.bias" in tensors
    optional = lambda name: name == "fc.bias" or name.startswith("transformer.layers.0.attention_norm")  # noqa: E731
    found = to_ours(tensors, DRAFTER, optional, source)
    if heads is None:
        heads = number(config, "num_attention_heads", source)
    key_heads = int(config.get("num_key_value_heads") or heads)
    shape = transformer_config(found, heads, key_heads, real(config, "rms_norm_eps", 1e-6, source), source)
    kind = config.get("input_type", "t2i")
    if kind not in DRAFTER_GRIDS:
        raise ValueError(f"{source}/config.json: input_type is {kind!r}; known are {', '.join(DRAFTER_GRIDS)}")
    codes, size = found.tensors["embedding"].shape
    if found.tensors["fc.weight"].shape != (size, 2 * size):
        raise ValueError(
            f"{source}: fc.weight is {list(found.tensors['fc.weight'].shape)}, expected {[size, 2 * size]}"
        )
    height, width = DRAFTER_GRIDS[kind]
    slots = 1 if kind == "c2i" else 120
    ours = EagleConfig(shape, codes, slots, height * width, bias=bias, own_embedding=True, mask_prefix_pads=False)
    found.tensors["prefix_embedding"] = found.tensors["embedding"][0].clone()
    return replace(found, config=ours.to_json())


def from_tokenizer(tensors: dict[str, Tensor], source: Path, image_size: int | None) -> Converted:
    """An official image tokenizer; all of its shape can be read off its tensors."""
    tensors = dict(tensors)
    unused = [name for name in ("quantize.codebook_used",) if tensors.pop(name, None) is not None]
    try:
        widths: list[int] = []
        while f"encoder.conv_blocks.{len(widths)}.res.0.conv1.weight" in tensors:
            widths.append(len(tensors[f"encoder.conv_blocks.{len(widths)}.res.0.conv1.weight"]))
        channels = len(tensors["encoder.conv_in.weight"])
        codes, dimensions = tensors["quantize.embedding.weight"].shape
        blocks = sum(f"encoder.conv_blocks.0.res.{i}.conv1.weight" in tensors for i in range(16))
        config = LlamaGenVQConfig(
            image_size=image_size or 256, codebook_size=codes, codebook_embed_dim=dimensions,
            z_channels=len(tensors["encoder.conv_out.weight"]), channels=channels,
            channel_multipliers=tuple(width // channels for width in widths), num_res_blocks=blocks,
        )  # fmt: skip
        with torch.device("meta"):
            check_fits(LlamaGenVQ(config), tensors, source)
    except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{source} is no LlamaGen image tokenizer: {error}") from None
    report = {"mapped": {name: [name] for name in tensors}, "unused": unused, "missing": []}
    return Converted({"type": "llamagen_vq", **asdict(config)}, tensors, report)


def from_image_reward(tensors: dict[str, Tensor], source: Path) -> Converted:
    shape, ours = from_published(tensors, source)
    mapped = {name: [theirs] for theirs, name in our_names(list(tensors)).items()}
    unused = sorted(set(tensors) - {theirs for parts in mapped.values() for theirs in parts})
    report = {"mapped": mapped, "unused": unused, "missing": []}
    return Converted({"type": "image_reward", **asdict(shape)}, ours, report)


# -------------------------------------------------------------------------------------------- and back again


def export(folder: Path, to: Format, target: Path | None) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Their config and tensors of one of our folders, and what they have no name for."""
    config, tensors = read_json(folder / "config.json"), read_tensors(folder)
    names = NAMES[to]
    if names is DRAFTER:
        if config.get("architecture") != "eagle":
            raise ValueError(
                f"{folder} is no draft head, so it cannot become {to}; choose llamagen or lantern-llamagen"
            )
        head = EagleConfig.from_json(config)
        if head.transformer.qk_norm or head.text:
            raise ValueError(f"{folder} drafts for a Chameleon; the way back is known for LlamaGen's heads only")
        if head.context:
            raise ValueError(f"{folder} reads a caption context at every token, which {to} has no place for")
        if not head.own_embedding:
            if target is None:
                raise ValueError(f"{folder} shares its target's embedding, which {to} keeps in the head; give --target")
            tensors["embedding"] = read_tensors(find_folder(target))["embedding.weight"]
        kinds = {height * width: kind for kind, (height, width) in DRAFTER_GRIDS.items()}
        if head.image_tokens not in kinds:
            raise ValueError(f"{folder} drafts {head.image_tokens} tokens; {to} knows {', '.join(map(str, kinds))}")
        theirs = to_theirs(tensors, names, head.transformer)
        if torch.equal(tensors["prefix_embedding"], tensors["embedding"][0]):
            tensors.pop("prefix_embedding")  # it says no more than token 0 does
        about = {"input_type": kinds[head.image_tokens], "bias": head.bias, "vocab_size": head.codebook_size}
        shape = head.transformer
    else:
        if config.get("architecture") != "llamagen" or config.get("words") or config.get("sketch_rank"):
            raise ValueError(f"{folder} is no published LlamaGen, so it cannot become {to}")
        own = LlamaGenConfig.from_json(config)
        shape, kind = own.transformer, "c2i" if own.classes else "t2i2" if own.grid == (32, 32) else "t2i"
        theirs = to_theirs(tensors, names, shape)
        about = {
            "input_type": kind, "vocab_size": own.codebook_size, "block_size": own.grid[0] * own.grid[1],
            "cls_token_num": own.prompt_slots, "caption_dim": own.caption_dim, "num_classes": own.classes or 1000,
            "rope_base": int(own.rope_base), "class_dropout_p": 0.1, "token_dropout_p": 0.0, "resid_dropout_p": 0.0,
            "ffn_dropout_p": 0.0, "max_position_embeddings": own.prompt_slots + own.grid[0] * own.grid[1] + 64,
        }  # fmt: skip
    llama = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.key_heads, "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu", "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False,
        "pretraining_tp": 1, "tie_word_embeddings": False, "initializer_range": 0.02, "use_cache": True,
        "torch_dtype": str(theirs["embed_tokens.weight" if names is DRAFTER else next(iter(theirs))].dtype)[6:],
    }  # fmt: skip
    known = expand(names, shape.layers)
    return {**llama, **about}, theirs, sorted(name for name in tensors if name not in known)


# ----------------------------------------------------------------------------------------------- the command


def convert(
    source: Path,
    out: Path,
    source_format: str = "auto",
    to: Format | None = None,
    image_size: ImageSize = None,
    heads: int | None = None,
    tokenizer: Path | None = None,
    target: Path | None = None,
    layout: Layout | None = None,
    pairing: Pairing = "detect",
) -> None:
    """Convert a published checkpoint into a folder of ours, or with `to` one of ours into a published format.

    Args:
        source: A .pt, .bin or .safetensors file, a Hugging Face folder, or with `to` a folder of ours.
        out: Folder to write; it must not exist yet.
        to: Write this format instead: llamagen (a .pt file), lantern-llamagen, lantern-drafter or eagle.
        image_size: Pixels, which files do not say: LlamaGen's of a side, Lumina-mGPT's of a side or [width, height].
        heads: Attention heads, for a LlamaGen of no published size.
        tokenizer: File of the image tokenizer (vq_ds16_*.pt, vqgan.ckpt), which goes into the target's folder.
        target: Our target's folder: the one that a head for Chameleon drafts for, or, for `to` lantern-drafter, the one
            whose embedding a head shares.
        layout: How a Chameleon lays its images out, as Lumina-mGPT or as Anole.
        pairing: Of a head for Chameleon, which token goes with a hidden state: the next or the same, or let the target
            tell by decoding with it.
    """
    if out.exists():
        raise ValueError(f"{out} is there already; choose another --out, or delete it")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        part.mkdir()
        if to is not None:
            report = write_theirs(find_folder(source), part, to, target)
        elif source_format == "chameleon" or (source_format == "auto" and is_chameleon(source)):
            report = write_chameleon(source, part, layout, image_size, tokenizer)
        elif isinstance(image_size, tuple):
            raise ValueError(f"image_size is {list(image_size)}, but only Lumina-mGPT's may differ: give one number")
        else:
            report = write_ours(source, part, source_format, image_size, heads, tokenizer, target, pairing)
        write_json(part / "convert.json", report)
        os.replace(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    joined = sum(map(len, report["mapped"].values()))
    unused = ", ".join(report["unused"][:4]) + ", ..." * (len(report["unused"]) > 4)
    print(f"{out}: {report['format']}, {joined} of their tensors; unused: {unused or 'none'}")


def write_ours(
    source: Path, part: Path, source_format: str, image_size: int | None, heads: int | None, tokenizer: Path | None,
    target: Path | None, pairing: Pairing,
) -> dict[str, Any]:  # fmt: skip
    if source_format == "vqgan" and source.is_dir():  # of a whole model only what it needs
        config: dict[str, Any] = {}
        shards = Shards(source)
        tensors = {name: shards.read(name) for name in shards.files if name.startswith("model.vqmodel.")}
    else:
        tensors, config = read_source(source)
    kind = detect(tensors, source) if source_format == "auto" else source_format
    if kind not in FORMATS:
        raise ValueError(f"no format named {kind!r}; choose auto, {', '.join(FORMATS)}")
    if kind == "image-reward":
        found = from_image_reward(tensors, source)
    elif kind == "vqgan":
        found = from_vqgan(tensors, source)
    elif "quantize.embedding.weight" in tensors:
        found = from_tokenizer(tensors, source, image_size)
    elif kind == "llamagen":
        found = from_llamagen(tensors, source, image_size, heads)
    elif kind == "lantern-llamagen":
        found = from_lantern(tensors, config, source)
    elif "layers.0.self_attn.q_norm.weight" in tensors:
        found = from_chameleon_drafter(tensors, config, source, target, pairing)
    else:
        found = from_drafter(tensors, config, source, heads)
    save_checkpoint(part, found.config, found.tensors)
    if tokenizer is not None:
        if found.config.get("architecture") != "llamagen":
            raise ValueError(f"tokenizer: {source} is no target, so no image tokenizer goes with it")
        grid = found.config["grid"]
        own = from_tokenizer(read_foreign(tokenizer), tokenizer, image_size or 16 * grid[0])
        if own.config["codebook_size"] != found.config["codebook_size"]:
            raise ValueError(
                f"{tokenizer} has {own.config['codebook_size']} codes, but {source} draws "
                f"{found.config['codebook_size']}"
            )
        save_checkpoint(part / "image_tokenizer", own.config, own.tensors)
    return {"source": source.name, "format": kind, **found.report}


def write_theirs(folder: Path, part: Path, to: Format, target: Path | None) -> dict[str, Any]:
    config, tensors, unused = export(folder, to, target)
    if to == "llamagen":
        torch.save({"model": tensors}, part / "llamagen.pt")
    else:
        save_file(tensors, part / "model.safetensors", {"format": "pt"})
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return {"source": folder.name, "format": to, "mapped": {name: [name] for name in tensors}, "unused": unused,
            "missing": []}  # fmt: skip


def main(args: list[str]) -> None:
    parser = argument_parser("convert", "Published checkpoints -> our folders, and back.")
    parser.add_argument("source", type=Path, help="file or folder to convert")
    parser.add_argument("--from", dest="source_format", type=str, default="auto", help=f"auto, {', '.join(FORMATS)}")
    call(convert, parser, args)
