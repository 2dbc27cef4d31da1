"""The embedded emoji dataset: its file, its splits, and the law by which images are composed."""

import hashlib
import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from data.emoji import dataset as emoji
from data.emoji.dataset import BACKGROUNDS, PARQUET, SIZE, SPLITS, STYLES, EmojiImages, items, render

SHA256 = "52242d43b01587ee7ff130817b242c681e99eef21e934e8b0d00834d20383ec4"
README = Path(emoji.__file__).with_name("README.md")


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return pq.read_table(PARQUET).to_pylist()


def key(item: emoji.EmojiItem) -> tuple[str, str, str]:
    return item.name, item.style, item.background


def alpha_image(rows: list[dict], item: emoji.EmojiItem) -> np.ndarray:
    """The stored picture of an item, uint8 [64, 64, 4]."""
    [png] = [row["image"]["bytes"] for row in rows if (row["name"], row["style"]) == (item.name, item.style)]
    return np.asarray(Image.open(io.BytesIO(png)))


def compose_slowly(rgba: np.ndarray, background: tuple[int, int, int]) -> np.ndarray:
    """float64 [64, 64, 3]: the textbook formula."""
    alpha = rgba[..., 3:] / 255
    return rgba[..., :3] * alpha + np.array(background) * (1 - alpha)


def test_parquet_is_the_published_one():
    data = PARQUET.read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256
    assert SHA256 in README.read_text(encoding="utf-8")
    assert len(data) < 12e6


def test_every_name_has_both_styles_and_clean_words(rows):
    assert len(rows) == 2102
    assert [(row["name"], row["style"]) for row in rows] == [
        (name, style) for name in sorted({row["name"] for row in rows}) for style in STYLES
    ]
    assert len({row["name"] for row in rows if row["core"]}) == 300
    for row in rows:
        assert row["name"] == row["name"].lower().strip() and row["name"].isascii()
        assert row["article"] in ("a", "an", "")
        assert row["split"] in ("train", "novel")


def test_pictures_are_64_pixel_rgba(rows):
    for row in rows:
        image = Image.open(io.BytesIO(row["image"]["bytes"]))
        assert (image.mode, image.size) == ("RGBA", (SIZE, SIZE)), row["name"]


def test_datasets_reads_the_parquet_with_decoded_images(tmp_path):
    from datasets import load_dataset

    loaded = load_dataset("parquet", data_files=str(PARQUET), split="train", cache_dir=str(tmp_path))
    assert loaded.num_rows == 2102
    assert (loaded[0]["image"].mode, loaded[0]["image"].size) == ("RGBA", (SIZE, SIZE))
    assert loaded[0]["name"] == "abacus" and loaded[0]["core"] is False


@pytest.mark.parametrize("core", [True, False])
def test_splits_partition_all_combinations(core, rows):
    names = {row["name"] for row in rows if row["core"] or not core}
    split = {name: items(name, core) for name in SPLITS}
    keys = [key(item) for name in SPLITS for item in split[name]]
    assert len(keys) == len(set(keys)) == len(names) * len(STYLES) * len(BACKGROUNDS)
    novel = {item.name for item in split["novel"]}
    seen = {item.name for item in split["train"] + split["combo"]}
    assert len(novel) == round(0.05 * 300) + (0 if core else round(0.05 * 751))
    assert not novel & seen
    trials = len(split["combo"]) + len(split["train"])
    # a hash is a fair coin: 4 standard deviations of a binomial share
    assert len(split["combo"]) / trials == pytest.approx(0.1, abs=4 * (0.1 * 0.9 / trials) ** 0.5)
    captions = [item.caption for name in SPLITS for item in split[name]]
    assert len(set(captions)) == len(captions)


def test_core_items_keep_their_split_among_all_names():
    for split in SPLITS:
        assert set(items(split, core=True)) <= set(items(split, core=False))


def test_counts_are_those_of_the_card():
    text = README.read_text(encoding="utf-8")
    for core in (True, False):
        counts = [f"{len(items(split, core)):,}" for split in SPLITS]
        assert " | ".join(counts) in text
    for name in {item.name for item in items("novel")}:
        assert name in " ".join(text.split())


def test_caption_names_style_article_name_and_background():
    captions = {item.caption for split in SPLITS for item in items(split)}
    assert "noto emoji of a red apple" in captions
    assert "noto emoji of a red apple on a light blue background" in captions
    assert "twemoji emoji of an alien on an orange background" in captions
    assert "twemoji emoji of scissors on a gray background" in captions


@pytest.mark.parametrize("index", range(0, 6000, 600))
def test_transparent_is_background_and_opaque_is_emoji(index, rows):
    item = items("train")[index]
    rgba, image = alpha_image(rows, item), render(item)
    background = BACKGROUNDS[item.background]
    clear, opaque = rgba[..., 3] == 0, rgba[..., 3] == 255
    assert image.shape == (SIZE, SIZE, 3) and image.dtype == np.uint8
    assert (image[clear] == background).all()
    assert (image[opaque] == rgba[..., :3][opaque]).all()
    # two roundings of at most half a level each
    assert np.abs(image - compose_slowly(rgba, background)).max() <= 1


def test_resized_emoji_has_no_fringe(rows):
    """Where the emoji's colours and the background lie in a range, so does the result: no dark or bright edge."""
    # a heart is one flat colour, so each channel must lie between that colour and the background
    item = next(i for i in items("train") if (i.name, i.style, i.background) == ("green heart", "twemoji", "yellow"))
    colour = alpha_image(rows, item)[SIZE // 2, SIZE // 2, :3].astype(int)
    for scale in range(emoji.SMALLEST, 65):
        image = render(item, scale).astype(int)
        low, high = np.minimum(colour, BACKGROUNDS["yellow"]), np.maximum(colour, BACKGROUNDS["yellow"])
        assert (image >= low - 2).all() and (image <= high + 2).all()


def test_moving_the_emoji_moves_its_pixels():
    item = items("train")[0]
    centred = render(item, 60, 2, 2)
    moved = render(item, 60, 4, 1)
    assert (moved[1:61, 4:64] == centred[2:62, 2:62]).all()
    assert (centred[:2] == BACKGROUNDS[item.background]).all() and (centred[:, 62:] == centred[0, 0]).all()


def test_jitter_is_a_function_of_seed_epoch_and_index():
    images, again = EmojiImages("train", seed=3), EmojiImages("train", seed=3)
    for index in (5, 0, 17):
        assert torch.equal(images[index]["image"], again[index]["image"])
    first = [images.placement(index) for index in range(300)]
    images.set_epoch(1)
    assert [images.placement(index) for index in range(300)] != first
    images.set_epoch(0)
    assert [images.placement(index) for index in range(300)] == first
    assert [EmojiImages("train", seed=4).placement(index) for index in range(300)] != first


def test_jitter_reaches_every_scale_and_stays_in_the_canvas():
    images = EmojiImages("train")
    placements = [images.placement(index) for index in range(2000)]
    assert {scale for scale, _, _ in placements} == {60, 61, 62, 63, 64}
    for scale, left, top in placements:
        assert 0 <= left <= SIZE - scale and 0 <= top <= SIZE - scale
    assert {(left, top) for scale, left, top in placements if scale == 60} == {
        (x, y) for x in range(5) for y in range(5)
    }


def test_without_jitter_the_epoch_changes_nothing():
    images = EmojiImages("combo", jitter=False)
    before = images[7]
    images.set_epoch(9)
    assert torch.equal(images[7]["image"], before["image"])
    assert images.placement(7) == (62, 1, 1)
    assert before["image"].shape == (3, SIZE, SIZE) and before["image"].dtype == torch.uint8
    assert (before["caption"], before["index"]) == (images.items[7].caption, 7)


def test_persistent_workers_see_the_epoch():
    images = EmojiImages("novel", limit=4)
    loader = torch.utils.data.DataLoader(images, batch_size=4, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        images.set_epoch(epoch)
        [batch] = list(loader)
        assert torch.equal(batch["image"], torch.stack([images[index]["image"] for index in range(4)]))


def test_smaller_limits_are_contained_in_larger_ones():
    small, large = EmojiImages("train", limit=50), EmojiImages("train", limit=100)
    assert len(small) == 50 and set(small.items) <= set(large.items)
    assert len({item.background for item in small.items}) > 6


def test_as_dataset_shows_the_same_images():
    loaded = emoji.as_dataset("novel", limit=6)
    images = EmojiImages("novel", jitter=False, limit=6)
    assert loaded.column_names == ["image", "caption"]
    for row, sample in zip(loaded, images, strict=True):
        assert row["caption"] == sample["caption"]
        assert (np.asarray(row["image"]).transpose(2, 0, 1) == sample["image"].numpy()).all()


def test_errors_name_value_and_remedy():
    with pytest.raises(ValueError, match="'valid'; choose one of train, combo, novel"):
        items("valid")
    with pytest.raises(ValueError, match=r"scale=65 pixels.*give 1 to 64"):
        render(items("train")[0], scale=65)
    with pytest.raises(ValueError, match=r"left=5.*give 0 to 4"):
        render(items("train")[0], scale=60, left=5)
    with pytest.raises(ValueError, match=r"limit=361.*360 items"):
        EmojiImages("novel", limit=361)
