"""The emojis' own metrics: known answers on networks made here, and what the shipped network can tell apart."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter

from coolsd import cli
from coolsd.checkpoint import CHECKPOINTS
from coolsd.emoji_metrics import CaptionImageConfig, CaptionImageNetwork, ClipEmoji, FrechetEmoji
from coolsd.metrics import squares, weights_hash
from data.emoji.dataset import EmojiImages
from training.caption_image import contrastive_loss
from training.target import caption_tokenizer

CPU = torch.device("cpu")
CAPTIONS = ["a red apple", "an apple on a red background", "rose"]


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Folder of a small random network."""
    torch.manual_seed(3)
    tokenizer = caption_tokenizer(CAPTIONS)
    made = CaptionImageNetwork(CaptionImageConfig(tokenizer.get_vocab_size(), 8, (4, 4, 8, 8), 6), tokenizer)
    folder = tmp_path_factory.mktemp("network")
    made.save(folder)
    return folder


def saved(folder, pictures):
    folder.mkdir()
    for index, picture in enumerate(pictures):
        picture.save(folder / f"{index:03d}.png")
    return sorted(folder.glob("*.png"))


def test_each_image_finds_its_caption_and_each_caption_its_image(rng):
    images, captions, scale = torch.randn(5, 3, generator=rng), torch.randn(5, 3, generator=rng), torch.tensor(7.0)
    total = 0.0
    for one, other in ((images, captions), (captions, images)):
        for i in range(5):
            scores = torch.stack([scale * F.cosine_similarity(one[i], other[j], dim=0) for j in range(5)])
            total -= scores.log_softmax(0)[i] / 10
    assert torch.allclose(contrastive_loss(images, captions, scale), total)


def test_the_score_is_the_mean_cosine_of_the_saved_network(network, tmp_path):
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)) for _ in range(3)]
    files = saved(tmp_path / "made", pictures)
    metric = ClipEmoji(str(network), batch_size=2)
    assert metric.missing() is None
    loaded = CaptionImageNetwork.load(network)
    expected = []
    for file, caption in zip(files, CAPTIONS, strict=True):
        image = loaded(torch.stack(list(squares([file], 64))))
        expected.append(100 * F.cosine_similarity(image, loaded.captions([caption])).clamp(min=0).item())
    assert metric.score(files, CAPTIONS, CPU) == pytest.approx(np.mean(expected), abs=1e-3) and max(expected) > 0
    assert metric.about()["network"] == weights_hash(loaded)


def test_padding_changes_no_caption_and_order_does(network):
    loaded = CaptionImageNetwork.load(network)
    alone = torch.cat([loaded.captions([caption]) for caption in CAPTIONS])
    assert torch.allclose(alone, loaded.captions(CAPTIONS), atol=1e-6)
    there, back = loaded.captions(["red apple on rose", "rose on red apple"])
    assert not torch.allclose(there, back, atol=1e-3)


def test_what_is_missing_is_one_sentence(network, tmp_path):
    for metric in (FrechetEmoji(network=str(tmp_path)), ClipEmoji(str(tmp_path))):
        said = metric.missing()
        assert said.startswith(f"{metric.column}: no checkpoint at") and "\n" not in said
    assert "is no caption-image network" in ClipEmoji("emoji/target").missing()
    (tmp_path / "fingerprint.json").write_text("{}")
    for change, words in (
        ({"channels": None}, "is not the config of a caption-image network"),
        ({"channels": [4] * 99}, "four of them as channels"),
        ({"words": "500"}, "positive integers"),
    ):
        config = json.loads((network / "config.json").read_text()) | change
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert words in ClipEmoji(str(tmp_path)).missing()


def test_the_shipped_network_knows_captions():
    """Held-out combinations: the nearest of 32 captions is nearly always the right one."""
    network = CaptionImageNetwork.load(CHECKPOINTS / "emoji" / "metrics")
    emojis = EmojiImages("combo", limit=320)
    images = torch.stack([emojis[i]["image"] for i in range(320)])
    captions = network.captions([item.caption for item in emojis.items])
    order = torch.randperm(320, generator=torch.Generator().manual_seed(0)).view(10, 32)
    with torch.inference_mode():
        features = network(images)
    similarity = F.normalize(features[order], dim=-1) @ F.normalize(captions[order], dim=-1).mT
    right = similarity.argmax(-1) == torch.arange(32)
    assert right.float().mean() > 0.9


def test_the_distance_grows_with_what_is_done_to_the_pictures(tmp_path):
    emojis = EmojiImages("combo", seed=1, limit=300)
    pictures = [Image.fromarray(emojis[i]["image"].permute(1, 2, 0).numpy()) for i in range(300)]
    metric = FrechetEmoji()
    assert metric.missing() is None
    changed = {
        "same": pictures,
        "soft": [picture.filter(ImageFilter.GaussianBlur(1)) for picture in pictures],
        "blurred": [picture.filter(ImageFilter.GaussianBlur(3)) for picture in pictures],
        "one": [pictures[0], pictures[1]] * 150,
    }
    found = [metric.score(saved(tmp_path / name, of), [""] * 300, CPU) for name, of in changed.items()]
    assert found == sorted(found) and found[0] < 0.2 * found[2]
    assert metric.about()["images"] == 300 and metric.about()["real_images"] == len(EmojiImages("combo"))


def test_a_fit_of_the_recipe_exports_a_network(tmp_path, capfd):
    words = "fit --config recipes/emoji/metrics.yaml --trainer.max_steps 2 --trainer.val_check_interval 2"
    words += " --data.batch_size 4 --data.held_out_images 8 --trainer.accelerator cpu"
    out = ["--out", str(tmp_path), "--trainer.enable_progress_bar", "false"]
    assert cli.main([*words.split(), *out]) == 0, capfd.readouterr().err
    assert ClipEmoji(str(tmp_path / "export")).missing() is None
