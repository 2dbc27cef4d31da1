import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coolsd.checkpoint import load_strictly, save_checkpoint
from coolsd.image_tokenizers import LlamaGenVQ, LlamaGenVQConfig, load_image_tokenizer

PARITY = Path(__file__).parent / "parity"
TINY = LlamaGenVQConfig(
    image_size=16, codebook_size=32, codebook_embed_dim=4, z_channels=8, channels=32, channel_multipliers=(1, 1),
    num_res_blocks=1, patch_size=2, norm_groups=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def official() -> tuple[LlamaGenVQ, dict[str, torch.Tensor]]:
    c = json.loads((PARITY / "llamagen_vq_a.json").read_text())["config"]
    model = LlamaGenVQ(
        LlamaGenVQConfig(
            image_size=c["image"][-1],
            codebook_size=c["codebook_size"],
            codebook_embed_dim=c["codebook_embed_dim"],
            l2_norm=c["l2_norm"],
            z_channels=c["z_channels"],
            channels=c["ch"],
            channel_multipliers=tuple(c["ch_mult"]),
            num_res_blocks=c["num_res_blocks"],
        )
    )
    weights = {}
    for path in sorted(PARITY.glob("llamagen_vq_a_weights_*.safetensors")):
        weights |= load_file(path)
    weights.pop("quantize.codebook_used")
    load_strictly(model, weights, "parity")
    return model.eval(), load_file(PARITY / "llamagen_vq_a_io.safetensors")


@torch.no_grad()
def test_encodes_like_llamagen(official):
    model, io = official
    torch.testing.assert_close(model.embed(io["in.image"]), io["encode.pre_quant"], rtol=0, atol=1e-4)
    quantised, indices = model.encode(io["in.image"])
    assert torch.equal(indices.flatten(), io["encode.indices"])
    torch.testing.assert_close(quantised, io["encode.quant"], rtol=0, atol=1e-5)


@torch.no_grad()
def test_decodes_like_llamagen(official):
    model, io = official
    torch.testing.assert_close(model.decode(io["encode.quant"]), io["decode.from_quant"], rtol=0, atol=1e-4)
    entry = model.quantize.lookup(io["in.codes"], model.config.grid)
    torch.testing.assert_close(entry, io["decode_code.entry"], rtol=0, atol=1e-6)
    torch.testing.assert_close(model.decode_code(io["in.codes"]), io["decode_code.image"], rtol=0, atol=1e-4)


def test_codebook_is_on_the_unit_sphere(official):
    model, _ = official
    torch.testing.assert_close(model.quantize.codebook().norm(dim=-1), torch.ones(model.config.codebook_size))


def test_grid_need_not_be_square(official):
    model, _ = official
    indices = torch.arange(24).reshape(2, 12)
    images = model.decode_images(indices, grid=(3, 4))
    assert images.shape == (2, 3, 12, 16) and images.dtype == torch.uint8
    assert model.encode_images(images).shape == (2, 12)


def test_saved_tokenizer_gives_the_same_tokens_and_pixels(tmp_path):
    torch.manual_seed(0)
    model = LlamaGenVQ(TINY).eval()
    model.save(tmp_path)
    loaded = load_image_tokenizer(tmp_path)
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    tokens = model.encode_images(images)
    assert loaded.config == TINY and tokens.shape == (2, 16)
    assert torch.equal(loaded.encode_images(images), tokens)
    assert torch.equal(loaded.decode_images(tokens), model.decode_images(tokens))


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    model = LlamaGenVQ(TINY)
    model.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["stranger"] = weights.pop("quant_conv.bias")
    weights["post_quant_conv.bias"] = torch.zeros(3)
    save_checkpoint(tmp_path, json.loads((tmp_path / "config.json").read_text()), weights)
    with pytest.raises(ValueError, match="does not fit") as error:
        load_image_tokenizer(tmp_path)
    for words in ("missing quant_conv.bias", "unknown stranger", "post_quant_conv.bias has shape [3], expected [8]"):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"channels": 36}, "multiple of norm_groups 8"),
        ({"image_size": 18}, "not a multiple of the downsampling 4"),
        ({"codebook_size": -1}, "codebook_size is -1"),
        ({"patch_size": "2"}, "patch_size is '2'"),
        ({"channel_multipliers": []}, "channel_multipliers"),
    ],
)
def test_impossible_configs_are_refused(tmp_path, change, words):
    LlamaGenVQ(TINY).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    save_checkpoint(tmp_path, config | change, {})
    with pytest.raises(ValueError, match=words):
        load_image_tokenizer(tmp_path)


def test_config_with_unknown_keys_is_refused(tmp_path):
    LlamaGenVQ(TINY).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    save_checkpoint(tmp_path, config | {"code": "os.system"}, {})
    with pytest.raises(ValueError, match="unknown \\['code'\\]"):
        load_image_tokenizer(tmp_path)
