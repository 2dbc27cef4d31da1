"""Chameleon's image tokenizer against Meta's numbers and transformers' encoder, and the files it comes from."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ChameleonVQVAEConfig
from transformers.models.chameleon.modeling_chameleon import ChameleonVQVAE

from coolsd.checkpoint import save_checkpoint
from coolsd.cli import main
from coolsd.image_tokenizers import load_image_tokenizer
from coolsd.image_tokenizers.vqgan import VQGAN, VQGANConfig, config_of, own_tensors

PARITY = Path(__file__).parent / "parity"
TINY = VQGANConfig(11, 6, 8, 32, (1, 2), 1, attention=(1,))


@pytest.fixture(scope="module")
def official():
    golden = load_file(PARITY / "vqgan_a.safetensors")
    weights = {name.removeprefix("sd."): value for name, value in golden.items() if name.startswith("sd.")}
    model = VQGAN(config_of(weights))
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False), golden, weights


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    return VQGAN(TINY).eval().requires_grad_(False)


def test_encodes_and_decodes_like_meta(official):
    model, golden, _ = official
    torch.testing.assert_close(model.embed(golden["in.image"]), golden["out.latent"], rtol=0, atol=1e-5)
    assert torch.equal(model.encode(golden["in.image"]), golden["out.indices"])
    torch.testing.assert_close(model.decode(golden["out.indices"]), golden["out.decoded"], rtol=0, atol=1e-4)
    torch.testing.assert_close(model.decode(golden["in.codes"]), golden["out.codes_decoded"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [((1, 2), 1, ()), ((1, 1, 2), 2, ()), ((1, 2, 1), 1, (1,))], ids=str)
def test_encodes_like_transformers(shape):
    multipliers, blocks, attention = shape
    torch.manual_seed(3)
    theirs = ChameleonVQVAE(
        ChameleonVQVAEConfig(
            embed_dim=6, num_embeddings=23, latent_channels=8, resolution=16, base_channels=32,
            channel_multiplier=list(multipliers), num_res_blocks=blocks,
            attn_resolutions=[16 >> level for level in attention],
        )
    ).eval()  # fmt: skip
    model = VQGAN(VQGANConfig(23, 6, 8, 32, multipliers, blocks, attention)).eval()
    images = torch.rand(2, 3, 16, 24) * 2 - 1
    with torch.no_grad():  # codes where the vectors are, so that many of them are met
        latents = theirs.quant_conv(theirs.encoder(images)).movedim(1, -1).flatten(0, 2)
        theirs.quantize.embedding.weight.copy_(latents[:: len(latents) // 23][:23])
    weights = {**model.state_dict(), **theirs.state_dict()}  # theirs has no decoder
    assert theirs.state_dict().keys() <= model.state_dict().keys() and config_of(weights) == model.config
    model.load_state_dict(weights)
    with torch.no_grad():
        wanted = theirs.encode(images).image_tokens
        assert torch.equal(model.encode(images).flatten(1), wanted.view(2, -1))
    assert len(wanted.unique()) > 3


def test_pixels_are_metas(tiny):
    # x / 255 * 2 - 1 in, clamped and truncated out: transformers' processor multiplies by 0.0078 instead
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, -1, -1)
    seen = []
    tiny.encode = lambda x: seen.append(x) or torch.zeros(1, 8, 8, dtype=torch.long)
    assert tiny.encode_images(images).shape == (1, 64)
    assert torch.equal(seen[0], images / 255 * 2 - 1) and float(seen[0].min()) == -1 and float(seen[0].max()) == 1
    tiny.decode = lambda codes: torch.tensor([-3.0, -1.0, -0.001, 0.0, 0.999, 3.0]).view(1, 1, 1, 6).expand(1, 3, 1, 6)
    assert tiny.decode_images(torch.zeros(1, 3, dtype=torch.long), (1, 3))[0, 0, 0].tolist() == [
        0,
        0,
        127,
        127,
        254,
        255,
    ]


def test_the_grid_need_not_be_square_and_a_saved_one_is_the_same(tiny, tmp_path):
    tiny.save(tmp_path)
    loaded = load_image_tokenizer(tmp_path)
    assert loaded.config == TINY and loaded.fingerprint.startswith(tmp_path.name)
    images = torch.randint(0, 256, (2, 3, 8, 12), dtype=torch.uint8)
    codes = loaded.encode_images(images)
    assert codes.shape == (2, 24) and torch.equal(codes, tiny.encode_images(images))
    assert loaded.decode_images(codes, (4, 6)).shape == images.shape
    assert loaded.raw_codebook().shape == (11, 6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"channels": 33}, "not a multiple of 32"),
        ({"codebook_size": 0}, "codebook_size is 0"),
        ({"channel_multipliers": []}, "channel_multipliers is"),
        ({"attention": [-1]}, "attention is"),
        ({"num_res_blocks": "2"}, "num_res_blocks is '2'"),
        ({"code": 1}, "unknown .'code'."),
        ({"z_channels": 9}, "does not fit"),
        ({"codebook_size": 1 << 40}, "does not fit"),  # and nothing that large is made
        ({"channels": 1 << 30}, "shapes that its config.json tells of"),
        ({"num_res_blocks": 1 << 30}, "at most 64"),
        ({"channel_multipliers": [1] * 99}, "99 levels"),
        ({"channel_multipliers": 2}, "channel_multipliers is 2, but must be a list"),
    ],
)
def test_impossible_configs_are_refused(tiny, tmp_path, change, words):
    tiny.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    save_checkpoint(tmp_path, config | change, load_file(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match=words):
        load_image_tokenizer(tmp_path)


# ----------------------------------------------------------------------------------------------- from their files


def test_metas_file_converts_without_its_losses(official, tmp_path):
    model, golden, weights = official
    losses = {"loss.discriminator.main.0.weight": torch.ones(3), "loss.logvar": torch.zeros(())}
    torch.save({"state_dict": {**weights, **losses}}, tmp_path / "vqgan.ckpt")
    assert main(["convert", str(tmp_path / "vqgan.ckpt"), "--out", str(tmp_path / "vqgan")]) == 0
    loaded = load_image_tokenizer(tmp_path / "vqgan")
    assert loaded.config == model.config
    assert torch.equal(loaded.encode(golden["in.image"]), golden["out.indices"])
    assert json.loads((tmp_path / "vqgan" / "convert.json").read_text())["unused"] == sorted(losses)


def test_a_hugging_face_folder_holds_it_too(official, tmp_path):
    _, golden, weights = official
    folder = tmp_path / "anole"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "chameleon"}))
    named = {f"model.vqmodel.{name}": value.contiguous() for name, value in weights.items()}
    save_file({**named, "model.norm.weight": torch.ones(2)}, folder / "model.safetensors")
    assert main(["convert", str(folder), "--from", "vqgan", "--out", str(tmp_path / "vqgan")]) == 0
    loaded = load_image_tokenizer(tmp_path / "vqgan")
    torch.testing.assert_close(loaded.decode(golden["out.indices"]), golden["out.decoded"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["text", "other", "half", "shape", "scalar", "pickle"])
def test_a_file_that_is_no_vqgan_is_one_sentence(official, tmp_path, capfd, kind):
    weights, path = dict(official[2]), tmp_path / "vqgan.ckpt"
    if kind == "text":
        path.write_text("not a checkpoint")
    elif kind == "other":
        torch.save({"state_dict": {"loss.logvar": torch.zeros(())}}, path)
    elif kind == "half":
        torch.save({"state_dict": {name: value for name, value in weights.items() if "decoder" not in name}}, path)
    elif kind == "pickle":
        path.write_bytes(b"\x80\x02.")
    elif kind == "scalar":
        torch.save({"state_dict": {**weights, "encoder.conv_in.weight": torch.ones(())}}, path)
    else:
        weights["quant_conv.weight"] = weights["quant_conv.weight"][:3]
        torch.save({"state_dict": weights}, path)
    assert main(["convert", str(path), "--from", "vqgan", "--out", str(tmp_path / "out")]) == 2
    said = capfd.readouterr().err.strip()
    assert "\n" not in said and "vqgan.ckpt" in said and not (tmp_path / "out").exists()
    words = {"half": "missing decoder", "shape": "quant_conv.weight", "other": "no VQGAN", "scalar": "no VQGAN"}
    assert words.get(kind, "not a whole") in said


def test_its_own_tensors_are_told_from_the_rest():
    names = ["loss.a", "encoder.x", "model.vqmodel.decoder.y", "model.layers.0.z", "quant_conv.bias"]
    assert set(own_tensors(dict.fromkeys(names))) == {"encoder.x", "decoder.y", "quant_conv.bias"}
