"""The LlamaGen target against the official code, and its cached, tree and teacher-forced passes against each other."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast, T5EncoderModel

import coolsd
from coolsd.checkpoint import write_fingerprint
from coolsd.interfaces import DraftTree, Prompt
from coolsd.sampling import Sampling
from coolsd.targets.captions import ClassLabels, T5Encoder, clean
from coolsd.targets.llamagen import LlamaGen, LlamaGenConfig
from coolsd.transformer import TransformerConfig
from coolsd.tree import ancestors, chain

PARITY = Path(__file__).parent / "parity"
CAPTIONS = ["a", "b c a", "a b c a"]


class GoldenCaptions(nn.Module):
    """A caption encoder that returns the golden features, whatever it is asked."""

    def __init__(self, features, mask):
        super().__init__()
        self.features, self.mask = features, mask

    def forward(self, captions, slots):
        return self.features, self.mask


def from_official(weights):
    """Official LlamaGen names -> ours; fused projections are concatenated."""
    ours = {
        "embedding.weight": weights["tok_embeddings.weight"],
        "caption_projection.fc1.weight": weights["cls_embedding.cap_proj.fc1.weight"],
        "caption_projection.fc2.weight": weights["cls_embedding.cap_proj.fc2.weight"],
        "null_caption": weights["cls_embedding.uncond_embedding"],
        "transformer.norm.weight": weights["norm.weight"],
        "lm_head.weight": weights["output.weight"],
    }
    for index in range(sum(name.endswith("wqkv.weight") for name in weights)):
        their, our = f"layers.{index}", f"transformer.layers.{index}"
        gate_up = [weights[f"{their}.feed_forward.{name}.weight"] for name in ("w1", "w3")]
        ours |= {
            f"{our}.attention.qkv.weight": weights[f"{their}.attention.wqkv.weight"],
            f"{our}.attention.output.weight": weights[f"{their}.attention.wo.weight"],
            f"{our}.feed_forward.gate_up.weight": torch.cat(gate_up),
            f"{our}.feed_forward.down.weight": weights[f"{their}.feed_forward.w2.weight"],
            f"{our}.attention_norm.weight": weights[f"{their}.attention_norm.weight"],
            f"{our}.feed_forward_norm.weight": weights[f"{their}.ffn_norm.weight"],
        }
    return ours


@pytest.fixture(scope="module")
def official():
    c = json.loads((PARITY / "llamagen_gpt_a.json").read_text())["config"]
    io = load_file(PARITY / "llamagen_gpt_a_io.safetensors")
    side = int(c["block_size"] ** 0.5)
    shape = TransformerConfig(c["dim"], c["n_layer"], c["n_head"], c["ffn_hidden"], norm_eps=c["norm_eps"])
    config = LlamaGenConfig(shape, c["vocab_size"], (side, side), c["cls_token_num"], c["caption_dim"], 0)
    target = LlamaGen(config, GoldenCaptions(io["in.caption_left_padded"], io["in.mask_left"].bool()))
    target.load_state_dict(from_official(load_file(PARITY / "llamagen_gpt_a_weights.safetensors")))
    return target.eval().requires_grad_(False), io, c["cfg_scale"]


def test_rope_table_is_the_official_one(official):
    target, io, _ = official
    torch.testing.assert_close(target.rope, io["rope_table"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("branch", ["cond", "uncond"])
def test_teacher_forced_pass_is_the_official_one(official, branch):
    target, io, _ = official
    prompt = target.encode(["", "", ""], guidance=True)
    output = target.forced(prompt, io["in.tokens"])
    which = 0 if branch == "cond" else 1
    torch.testing.assert_close(output.logits[:, which], io[f"train_{branch}.logits"], rtol=0, atol=1e-4)
    hidden, golden = output.hidden_states[:, which, :-1], io[f"train_{branch}.hidden"]
    slots = prompt.mask.shape[-1]
    valid = torch.cat([prompt.mask[:, which], torch.ones(3, hidden.shape[1] - slots, dtype=torch.bool)], dim=1)
    torch.testing.assert_close(hidden[valid], golden[valid], rtol=0, atol=1e-5)
    if branch == "cond":  # no bias anywhere: a padded caption slot stays zero through every layer
        assert not hidden[~valid].any() and not golden[~valid].any()


def test_cached_pass_is_the_official_one(official):
    target, io, scale = official
    prompt = target.encode(["", "", ""], guidance=True)
    output, cache = target.prefill(prompt, 1)
    golden = {name: io[f"cache.{name}"].unflatten(0, (2, 3)).transpose(0, 1) for name in (
        "prefill_hidden", "prefill_logits", "step_hidden", "step_logits")}  # fmt: skip
    mask = prompt.mask
    torch.testing.assert_close(output.hidden_states[mask], golden["prefill_hidden"][mask], rtol=0, atol=1e-5)
    torch.testing.assert_close(output.logits, golden["prefill_logits"][:, :, -1:], rtol=0, atol=1e-4)
    sampling = Sampling(guidance=scale)
    guided = [sampling.guided(output.logits)]
    for step in range(target.image_tokens - 1):
        tree = DraftTree(io["in.tokens"][:, step : step + 1], (-1,), torch.empty(3, 0, 97))
        output = target.score(tree, prompt, cache)
        cache.keep(None, torch.ones(6, dtype=torch.long), 6 + step + 1)
        torch.testing.assert_close(output.hidden_states[:, :, 0], golden["step_hidden"][:, :, step], rtol=0, atol=1e-5)
        torch.testing.assert_close(output.logits[:, :, 0], golden["step_logits"][:, :, step], rtol=0, atol=1e-4)
        guided.append(sampling.guided(output.logits))
    # the scale of 7.5 multiplies rounding by about 15
    torch.testing.assert_close(torch.cat(guided, 1), io["cache.cfg_logits"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("guidance", [False, True])
@pytest.mark.parametrize("sketch", [0, 3])
def test_cached_pass_equals_the_teacher_forced_one(toy, rng, guidance, sketch):
    target, _ = toy(sketch=sketch)
    prompt = target.encode(CAPTIONS, guidance)
    tokens = torch.randint(5, (3, target.image_tokens), generator=rng)
    forced = target.forced(prompt, tokens)
    output, cache = target.prefill(prompt, 4)
    torch.testing.assert_close(output.hidden_states, forced.hidden_states[:, :, :4], rtol=0, atol=1e-5)
    torch.testing.assert_close(output.logits[:, :, 0], forced.logits[:, :, 0], rtol=0, atol=1e-4)
    start = 0
    for count in (1, 4, 2, 1, 1):
        tree = DraftTree(tokens[:, start : start + count], chain(count - 1), torch.empty(3, 0, 5))
        output = target.score(tree, prompt, cache)
        behind = slice(4 + start, 4 + start + count)
        torch.testing.assert_close(output.hidden_states, forced.hidden_states[:, :, behind], rtol=0, atol=1e-4)
        wanted = forced.logits[:, :, start + 1 : start + count + 1]
        torch.testing.assert_close(output.logits[:, :, : wanted.shape[2]], wanted, rtol=0, atol=1e-4)
        start += count
        cache.keep(None, torch.full_like(cache.length, count), 4 + start)
    assert start == target.image_tokens


@pytest.mark.parametrize("guidance", [False, True])
def test_tree_logits_equal_path_logits(toy, rng, guidance):
    target, _ = toy()
    parent = (-1, 0, 0, 1, 1, 2, 4)
    prompt = target.encode(CAPTIONS, guidance)
    _, cache = target.prefill(prompt, 7)
    committed = torch.randint(5, (3, 3), generator=rng)
    for row_count in (2, 1):  # rows of different length: row 0 commits less
        start = 0 if row_count == 2 else 2
        tree = DraftTree(committed[:, start : start + row_count], chain(row_count - 1), torch.empty(3, 0, 5))
        target.score(tree, prompt, cache)
        count = torch.tensor([row_count if start == 0 else 0, row_count, row_count]).repeat_interleave(prompt.branches)
        cache.keep(None, count, 4 + start + row_count)
    tree = DraftTree(torch.randint(5, (3, 7), generator=rng), parent, torch.empty(3, 0, 5))
    output = target.score(tree, prompt, cache)
    for row in range(3):
        alone = target.encode(CAPTIONS[row : row + 1], guidance)
        before = committed[row, : 2 if row == 0 else 3]
        for node in range(7):
            path = ancestors(parent, torch.device("cpu"))[node].nonzero().flatten()
            tokens = torch.cat([before, tree.tokens[row, path], torch.zeros(1, dtype=torch.long)])[None]
            forced = target.forced(alone, tokens)
            torch.testing.assert_close(output.logits[row, :, node], forced.logits[0, :, -1], rtol=0, atol=1e-4)
            torch.testing.assert_close(
                output.hidden_states[row, :, node], forced.hidden_states[0, :, -2], rtol=0, atol=1e-4
            )


def test_the_content_of_padding_changes_nothing(toy, rng):
    target, _ = toy()
    prompt = target.encode(["a", "b c"], guidance=True)
    features = prompt.inputs["features"]
    noise = torch.randn(features.shape, generator=rng) * ~prompt.mask[..., None]
    other = Prompt(prompt.captions, prompt.mask, {**prompt.inputs, "features": features + noise})
    tokens = torch.randint(5, (2, 9), generator=rng)
    tree = DraftTree(tokens[:, :2], chain(1), torch.empty(2, 0, 5))
    results = []
    for given in (prompt, other):
        output, cache = target.prefill(given, 2)
        forced = target.forced(given, tokens)
        results.append((output.logits, target.score(tree, given, cache).logits, forced.logits))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)
    assert noise.abs().max() > 1


def test_rows_do_not_see_each_other(toy):
    target, _ = toy()
    tokens = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]] * 3)
    together = target.forced(target.encode(CAPTIONS, True), tokens).logits
    alone = [target.forced(target.encode([caption], True), tokens[:1]).logits for caption in CAPTIONS]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-4)
    assert (together[0] - together[1]).abs().max() > 0.1  # captions matter
    assert (together[:, 0] - together[:, 1]).abs().max() > 0.1  # and so does having one


def test_guidance_branches_equal_separate_runs(toy, rng):
    target, _ = toy()
    tokens = torch.randint(5, (3, 9), generator=rng)
    both = target.encode(CAPTIONS, guidance=True)
    logits = target.forced(both, tokens).logits
    for branch in (0, 1):
        inputs = {name: tensor[:, branch : branch + 1] for name, tensor in both.inputs.items()}
        alone = target.forced(Prompt(both.captions, both.mask[:, branch : branch + 1], inputs), tokens).logits
        torch.testing.assert_close(logits[:, branch : branch + 1], alone, rtol=0, atol=1e-4)
    plain = target.forced(target.encode(CAPTIONS, guidance=False), tokens).logits
    torch.testing.assert_close(logits[:, :1], plain, rtol=0, atol=1e-4)


def test_captions_are_left_padded_cut_and_never_empty(toy):
    target, _ = toy()
    prompt = target.encode(["b", "a b c a b c", "stranger"], guidance=False)
    assert prompt.mask[:, 0].tolist() == [[False] * 3 + [True], [True] * 4, [False] * 3 + [True]]
    words = target.caption_encoder.embedding.weight
    features = prompt.inputs["features"][:, 0]
    assert torch.equal(features[0, -1], words[2]) and not features[0, :-1].any()
    assert torch.equal(features[1], words[torch.tensor([1, 2, 3, 1])])  # the last words are lost
    assert torch.equal(features[2, -1], words[0])
    with pytest.raises(ValueError, match=r"caption 1 \(' '\) has no words"):
        target.encode(["a", " "], guidance=False)


def test_positions_stay_float32_in_bfloat16(toy_copy):
    target, head = toy_copy()
    before = target.rope.clone()
    target, head = target.bfloat16(), head.bfloat16()
    assert target.dtype == torch.bfloat16 and torch.equal(target.rope, before) and torch.equal(head.rope, before)
    logits = target.forced(target.encode(["a"], True), torch.zeros(1, 9, dtype=torch.long)).logits
    assert logits.dtype == torch.bfloat16 and bool(logits.isfinite().all())


def test_a_saved_target_loads_and_says_the_same(toy_copy, tmp_path, rng):
    target, _ = toy_copy()
    target.save(tmp_path / "toy")
    loaded = coolsd.load_target(tmp_path / "toy", device="cpu", dtype="float32", verify=True)
    assert loaded.fingerprint == target.fingerprint and loaded.config == target.config
    tokens = torch.randint(5, (3, 9), generator=rng)
    one, two = (model.forced(model.encode(CAPTIONS, True), tokens).logits for model in (target, loaded))
    assert torch.equal(one, two)


HUGE = 1 << 30


class Modest(TorchDispatchMode):
    """Fails where a tensor of more than 1 MiB takes memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (list, tuple)) else [made]:
            assert not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.nbytes <= 1 << 20, tensor.shape
        return made


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("target", {"grid": [3]}, r"grid is \[3\], but must be"),
        ("target", {"prompt_slots": "4"}, "prompt_slots is '4'"),
        ("target", {"prompt_slots": 1 << 24}, "integer from 1 to 4096"),
        ("target", {"prompt_slots": 3, "classes": 2}, "integer from 1 to 1"),
        ("target", {"grid": [1024, 1024]}, "at most 65536 tokens"),
        ("target", {"codebook_size": 1 << 24}, "embedding.weight has shape"),
        ("target", {"rope_base": None}, "rope_base is None"),
        ("target", {"words": 2}, "has ids up to 3, but the model has 2"),
        ("target", {"transformer": {"hidden_size": HUGE}}, "its config.json tells of"),
        ("target", {"transformer": {"layers": HUGE}}, "must be at most 1024"),
        ("target", {"transformer": {"intermediate_size": HUGE}}, "expected"),
        ("draft", {"prompt_slots": "4"}, "prompt_slots is '4'"),
        ("draft", {"target": 5}, "target is 5"),
        ("draft", {"layers": None}, "not the config of an EAGLE head"),
        ("draft", {"layers": ["1"]}, "must be integers"),
        ("draft", {"transformer": {"layers": HUGE}}, "must be at most 1024"),
        ("draft", {"transformer": {"intermediate_size": HUGE}}, "expected"),
        ("draft", {"text": 1 << 24}, "missing text_embedding"),
        ("tokenizer", {"channels": HUGE}, "its config.json tells of"),
        ("tokenizer", {"num_res_blocks": HUGE}, "must be at most 64"),
    ],
)
def test_a_hostile_config_is_one_sentence_and_takes_no_memory(saved_toy, tmp_path, part, change, said):
    shutil.copytree(saved_toy, tmp_path / "toy")
    folder = tmp_path / "toy" / part
    config = json.loads((folder / "config.json").read_text())
    for name, value in change.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config))
    write_fingerprint(folder, list(json.loads((folder / "fingerprint.json").read_text())))
    sound = None if part != "draft" else coolsd.load_target(tmp_path / "toy" / "target", "cpu")
    with pytest.raises(ValueError, match=said) as raised, Modest():
        coolsd.load_head(folder, sound) if sound else coolsd.load_target(tmp_path / "toy" / "target", "cpu")
    assert "\n" not in str(raised.value)


def test_a_broken_vocabulary_is_one_sentence(saved_toy, tmp_path):
    shutil.copytree(saved_toy, tmp_path / "toy")
    (tmp_path / "toy" / "target" / "captions.json").write_text("{}")
    write_fingerprint(tmp_path / "toy" / "target", ["config.json", "model.safetensors", "captions.json"])
    with pytest.raises(ValueError, match=r"captions.json is no tokenizer .* copy the checkpoint's own"):
        coolsd.load_target(tmp_path / "toy" / "target", "cpu")


# ------------------------------------------------------------------------------------- what prompts a LlamaGen


@pytest.mark.parametrize(
    ("caption", "cleaned"),
    [
        ("A Photo of  a CAT ", "a photo of a cat"),
        ("see https://example.com/a?b and www.test.org/x for more", "see ?b and for more"),
        ("<b>bold</b> &amp; <person> at 127.0.0.1", "bold person at"),
        ("a dog 猫 und ein vogel", "a dog und ein vogel"),
        ("this-is-my-cute-cat", "this is my cute cat"),
        ("two-tone car", "two-tone car"),
        ("“curly” quotes", '"curly" quotes'),
        ("free shipping of IMG_1234.jpg on page 12 #12345", "of on"),
        ("red,green", "red, green"),
        ("a\x00b", "a b"),
        ("😀 a smile", "😀 a smile"),
        ("قطة على سجادة", "قطة على سجادة"),
    ],
)
def test_captions_are_cleaned_as_by_llamagen(caption, cleaned):
    assert clean(caption) == cleaned


def test_t5_features_are_those_of_a_padded_batch_moved_to_the_left(text_encoder, tmp_path, monkeypatch):
    encoder = T5Encoder(str(text_encoder), tmp_path / "kept", dtype=torch.float32)
    captions, slots = ["A red apple", "cat", "a " * 400], 6
    features, mask = encoder(captions, slots)
    fast, model = PreTrainedTokenizerFast.from_pretrained(text_encoder), T5EncoderModel.from_pretrained(text_encoder)
    texts = [clean(caption) for caption in captions]
    batch = fast(texts, max_length=slots, padding="max_length", truncation=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    held = batch["attention_mask"].bool()
    for row in range(3):
        count = int(held[row].sum())
        assert mask[row].tolist() == [False] * (slots - count) + [True] * count
        torch.testing.assert_close(features[row, slots - count :], hidden[row, :count], rtol=0, atol=1e-5)
        assert not features[row, : slots - count].any()
    monkeypatch.setattr(T5Encoder, "_load", lambda self: pytest.fail("its features were kept"))
    again = T5Encoder(str(text_encoder), tmp_path / "kept", dtype=torch.float32)(captions[::-1], slots)
    assert torch.equal(again[0].flip(0), features) and torch.equal(again[1].flip(0), mask)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (b"half", "holds no caption features"),
        ({"states": torch.zeros(2, 24)}, "holds no caption features"),
        ({"features": torch.zeros(7, 24)}, r"have shape \[7, 24\]"),
        ({"features": torch.zeros(24)}, r"have shape \[24\]"),
        ({"features": torch.zeros(2, 23)}, "caption features 23 wide, and 24"),
    ],
    ids=str,
)
def test_broken_kept_features_are_one_sentence(text_encoder, tmp_path, broken, said):
    encoder = T5Encoder(str(text_encoder), tmp_path, dtype=torch.float32)
    encoder(["cat"], 6)
    (path,) = tmp_path.iterdir()
    path.write_bytes(broken) if isinstance(broken, bytes) else save_file(broken, path)
    with pytest.raises(ValueError, match=said):
        encoder(["cat", "a red apple"], 6)


def test_any_caption_is_encoded_or_refused_in_a_sentence(text_encoder):
    encoder = T5Encoder(str(text_encoder), dtype=torch.float32)
    for caption in ("x" * 10_000, "a " * 20_000, "😀", "قطة", "red\x00apple", "\ud800 a", "((((" * 2000 + "cat"):
        features, mask = encoder([caption], 6)
        assert bool(features.isfinite().all()) and 1 <= int(mask.sum()) <= 6
    for caption in ("", "   ", "\x00", "https://example.com", "漢字"):
        with pytest.raises(ValueError, match=r"caption 1 .* has no words"):
            encoder(["cat", caption], 6)
    with pytest.raises(FileNotFoundError, match=r"could not be loaded.*coolsd captions"):
        T5Encoder(str(text_encoder / "nowhere"))(["cat"], 6)


def test_a_text_encoder_that_is_loaded_works_whatever_device_its_target_goes_to(text_encoder):
    encoder = T5Encoder(str(text_encoder), dtype=torch.float32)
    before, _ = encoder(["a cat"], 6)
    encoder.device = torch.device("meta")
    assert torch.equal(encoder(["a cat"], 6)[0], before)


@pytest.mark.parametrize("guidance", [False, True])
def test_a_class_prompts_as_a_caption_of_one_slot(guidance, rng):
    config = LlamaGenConfig(TransformerConfig(32, 2, 2, 48), 5, (3, 3), 1, classes=10)
    torch.manual_seed(0)
    target = LlamaGen(config, ClassLabels(10)).eval().requires_grad_(False)
    prompt, tokens = target.encode(["7", "0"], guidance), torch.randint(5, (2, 9), generator=rng)
    forced = target.forced(prompt, tokens)
    embedding = target.class_embedding.weight
    torch.testing.assert_close(prompt.inputs["features"][:, 0, 0], embedding[[7, 0]])
    if guidance:
        torch.testing.assert_close(prompt.inputs["features"][:, 1, 0], embedding[[10, 10]])
    output, cache = target.prefill(prompt, 9)
    torch.testing.assert_close(output.logits[:, :, 0], forced.logits[:, :, 0], rtol=0, atol=1e-4)
    output = target.score(DraftTree(tokens, chain(8), torch.empty(2, 0, 5)), prompt, cache)
    torch.testing.assert_close(output.logits[:, :, :-1], forced.logits[:, :, 1:], rtol=0, atol=1e-4)
    for caption in ("10", "-1", "cat", "", "7.0"):
        with pytest.raises(ValueError, match="give a number from 0 to 9"):
            target.encode([caption], guidance)
