"""`coolsd generate` on a toy target: names, metadata, resuming, Ctrl-C, batches, hostile captions."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from coolsd import cli, generate_images, results
from coolsd.interfaces import DecodeResult


@pytest.fixture(scope="module")
def options(saved_toy):
    return ["--target", str(saved_toy / "target"), "--head", str(saved_toy / "draft"), "--dtype", "float32"]


def strict(path):
    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    return json.loads(path.read_text("utf-8"), parse_constant=refuse)


def pixels(folder):
    return {file.name: Image.open(file).tobytes() for file in sorted(folder.glob("*.png"))}


def test_files_are_named_by_row_and_caption_and_say_how_they_were_made(options, tmp_path):
    generate_images.main(
        ["a b", "Ça c'est b", "--out", str(tmp_path), *options, "--images_per_prompt", "2", "--delta", "2"]
    )
    names = ["00000-a-b.png", "00001-a-b.png", "00002-ca-c-est-b.png", "00003-ca-c-est-b.png"]
    assert sorted(pixels(tmp_path)) == names
    text = Image.open(tmp_path / names[2]).text
    assert text["caption"] == "Ça c'est b" and text["row"] == "2" and text["seed"] == "0"
    assert json.loads(text["rule"])["delta"] == 2 and json.loads(text["sampling"]) == dataclasses.asdict(
        generate_images.EMOJI_SAMPLING
    )
    assert text["target"].startswith("target@") and json.loads(text["drafter"])["head"].startswith("draft@")
    stats = strict(tmp_path / "stats.json")
    assert [image["file"] for image in stats["images"]] == names and stats["tokens_per_second"] > 0
    for image in stats["images"]:
        assert sum(image["emitted"]) == 8 and len(image["emitted"]) == image["target_calls"]  # T - 1 after the prefill
        assert math.isclose(image["accepted_length"], 8 / image["target_calls"], rel_tol=1e-6)
        assert image["bias_per_token"] >= 0 and image["nll_per_token"] > 0 and image["seconds"] > 0


def test_images_do_not_depend_on_the_batch_size(options, tmp_path):
    for size in (1, 3, 5):
        generate_images.main(["a", "b", "c c", "a b", "b a", "--out", f"{tmp_path}/{size}", *options,
                              "--batch_size", str(size)])  # fmt: skip
    one = pixels(tmp_path / "1")
    assert len(set(one.values())) > 1
    for other in (pixels(tmp_path / "3"), pixels(tmp_path / "5")):
        assert one.keys() == other.keys()
        for name, levels in one.items():  # tokens are equal; a level may round the other way in another batch
            change = np.frombuffer(levels, np.uint8).astype(int) - np.frombuffer(other[name], np.uint8)
            assert np.abs(change).max() <= 1


def test_what_is_there_is_kept_and_other_settings_are_refused(options, tmp_path, monkeypatch, capsys):
    command = ["generate", "a", "b", "--out", str(tmp_path), *options]
    assert cli.main(command) == 0
    before, stats = pixels(tmp_path), (tmp_path / "stats.json").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(generate_images, "load_target", lambda *_: pytest.fail("there is nothing to make"))
        assert cli.main(command) == 0
        assert "2 already there" in capsys.readouterr().out
        assert cli.main([*command, "--seed", "1"]) == 2
        assert cli.main([*command, "--plain"]) == 2
    sentences = capsys.readouterr().err.strip().splitlines()
    assert len(sentences) == 2 and all("--overwrite" in sentence for sentence in sentences)
    assert pixels(tmp_path) == before and (tmp_path / "stats.json").read_text() == stats
    assert cli.main([*command, "--seed", "1", "--overwrite"]) == 0
    assert Image.open(tmp_path / "00000-a.png").text["seed"] == "1"


@pytest.mark.parametrize("half", [False, True])
def test_what_is_no_picture_is_refused_in_a_sentence_and_overwritten(options, tmp_path, capsys, half):
    command = ["generate", "a", "--out", str(tmp_path), *options]
    assert cli.main(command) == 0
    file = tmp_path / "00000-a.png"
    whole = file.read_bytes()
    file.write_bytes(whole[:-40] if half else b"no picture")
    assert cli.main(command) == 2
    assert "made with other settings; add --overwrite" in capsys.readouterr().err
    assert cli.main([*command, "--overwrite"]) == 0
    assert file.read_bytes() == whole


def test_ctrl_c_keeps_finished_images_and_the_next_run_resumes(options, tmp_path, monkeypatch):
    command = ["a", "b", "c", "a b", "b c", *options, "--batch_size", "2"]
    generate_images.main([*command, "--out", str(tmp_path / "whole")])
    real, calls = generate_images.generate, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(generate_images, "generate", interrupted)
    assert cli.main(["generate", *command, "--out", str(tmp_path / "cut")]) == 130
    whole, cut = pixels(tmp_path / "whole"), pixels(tmp_path / "cut")
    assert cut == {name: whole[name] for name in list(whole)[:2]}
    assert [image["row"] for image in strict(tmp_path / "cut" / "stats.json")["images"]] == [0, 1]
    generate_images.main([*command, "--out", str(tmp_path / "cut")])
    assert pixels(tmp_path / "cut") == whole and len(calls) == 4  # two images, then two batches for the other three
    assert [image["row"] for image in strict(tmp_path / "cut" / "stats.json")["images"]] == [0, 1, 2, 3, 4]
    assert not [file for file in (tmp_path / "cut").iterdir() if file.suffix not in (".png", ".json")]


def test_numbers_of_other_captions_stay(options, tmp_path):
    for captions in (["a", "b"], ["a", "c"]):
        generate_images.main([*captions, "--out", str(tmp_path), *options])
    stats = strict(tmp_path / "stats.json")
    assert {image["caption"] for image in stats["images"]} == {"a", "b", "c"} and stats["dtype"] == "torch.float32"
    assert "threads" in stats["environment"]


@pytest.mark.parametrize(
    "caption", ["../../x", "/etc/passwd", "..", "a\\..\\b", "<script>b</script>", "猫 a", "a" * 500]
)
def test_no_caption_leads_out_of_the_folder(caption, tmp_path):
    (job,) = generate_images.plan([caption], 1, tmp_path)
    assert job.file.resolve().parent == tmp_path.resolve()
    assert set(job.file.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.") and len(job.file.name) < 80


def test_prompt_files_are_utf_8_and_blank_lines_are_ignored(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffa\r\n\n  ça b \n".encode())
    assert generate_images.read_prompts(file) == ["a", "ça b"]
    file.write_bytes(b"a\n\xff\n")
    with pytest.raises(ValueError, match="UTF-8"):
        generate_images.read_prompts(file)
    file.write_bytes(b"\n \n")
    with pytest.raises(ValueError, match="no caption"):
        generate_images.read_prompts(file)


def test_prompts_come_from_published_files_too(tmp_path):
    words = [{"image_id": i % 40, "caption": f"image {i % 40}\n wording {i // 40} "} for i in range(120)]
    (tmp_path / "captions.json").write_text(json.dumps({"annotations": words}))
    found = generate_images.read_prompts(tmp_path / "captions.json")
    assert found == generate_images.read_prompts(tmp_path / "captions.json")
    assert sorted(line.split(" wording ")[0] for line in found) == sorted(f"image {i}" for i in range(40))
    assert [line.split()[1] for line in found] != sorted((line.split()[1] for line in found), key=int)
    assert {line[-1] for line in found} == {"0", "1", "2"}
    (tmp_path / "parti.tsv").write_text('Prompt\tCategory\n"a" quote\tA\n\tB\nbirds\tC\n')
    assert generate_images.read_prompts(tmp_path / "parti.tsv") == ['"a" quote', "birds"]
    (tmp_path / "parti.tsv").write_text("Words\tCategory\na\tA\n")
    with pytest.raises(ValueError, match="no column Prompt; its columns are Words, Category"):
        generate_images.read_prompts(tmp_path / "parti.tsv")
    (tmp_path / "captions.json").write_text('{"annotations": [{"image_id": 1}]}')
    with pytest.raises(ValueError, match="no caption file of MS-COCO: KeyError"):
        generate_images.read_prompts(tmp_path / "captions.json")


def test_mistakes_are_one_sentence(options, tmp_path, capsys):
    out = ["--out", str(tmp_path / "none"), *options]
    mistakes = {
        "no captions": out,
        "--prompts": ["--prompts", str(tmp_path / "no.txt"), *out],
        "no rule named": ["a", "--rule", "cold-sd", *out],
        "has no delta": ["a", "--rule", "vanilla", "--delta", "2", *out],
        "must be a number > 0": ["a", "--delta", "0", *out],
        "length": ["a", "--length", "0", *out],
        "without a draft": ["a", "--plain", "--delta", "2", *out],
        "batch_size": ["a", "--batch_size", "0", *out],
        "no checkpoint": ["a", "--out", str(tmp_path / "none"), "--target", "nowhere"],
        "caption 1 is empty": ["a", " ", *out],
    }
    for words, arguments in mistakes.items():
        assert cli.main(["generate", *arguments]) == 2, arguments
        sentence = capsys.readouterr().err.strip()
        assert "\n" not in sentence
        assert words in sentence or (words == "--prompts" and "no.txt" in sentence)
    assert not (tmp_path / "none").exists()


def test_an_infinite_kl_is_null_and_said_to_be_infinite():
    one, inf = torch.ones(2), torch.tensor([math.inf, 0.5])
    result = DecodeResult(one.long()[:, None], None, one, one.long(), one.long()[:, None], one, inf, one)
    first, second = results.record(result, 0), results.record(result, 1)
    assert (first["kl_per_token"], first["kl_infinite"]) == (None, True)
    assert (second["kl_per_token"], second["kl_infinite"]) == (0.5, False)
    json.dumps([first, second], allow_nan=False)


def test_the_memory_estimate_is_the_size_of_the_real_cache(toy):
    target, _ = toy()
    config = json.loads(json.dumps(dataclasses.asdict(target.config)))
    estimate, _ = generate_images.bytes_per_image(config, branches=2, nodes=6, itemsize=4)
    _, cache = target.prefill(target.encode(["a"], True), 6)
    layers = config["transformer"]["layers"]
    assert (
        estimate == sum(map(torch.Tensor.numel, cache.stores)) * 4 * (layers + 1) // layers
    )  # the draft head's layer is counted too
