"""Lumina-mGPT and Anole: numbers of the public code and of transformers' modules, the layout of images, and the law of
decoding where the layout forces tokens."""

import copy
import dataclasses
import functools
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import ChameleonConfig as TheirConfig
from transformers import ChameleonForConditionalGeneration

import coolsd
from coolsd.checkpoint import numbers_stored, write_fingerprint
from coolsd.cli import main
from coolsd.decode import autoregressive, generate
from coolsd.drafters.chain import Chain
from coolsd.drafters.dynamic_tree import DynamicTree
from coolsd.drafters.jacobi import Jacobi
from coolsd.drafters.static_tree import StaticTree
from coolsd.heads.eagle import EagleConfig, EagleHead, make_head
from coolsd.heads.pairing import agreement
from coolsd.image_tokenizers.vqgan import VQGAN, VQGANConfig
from coolsd.interfaces import DraftTree, Layout
from coolsd.replay import Recorder, Replay
from coolsd.rules.relaxed import CoolSD, Uniform, Vanilla
from coolsd.sampling import Sampling
from coolsd.targets.chameleon import Chameleon, ChameleonConfig, ours, read_tokenizer
from coolsd.transformer import TransformerConfig
from coolsd.tree import ancestors, chain
from training.draft import DraftTraining

PARITY = Path(__file__).parent / "parity"
CAPTIONS = ["a b", "c", "a b c a", "b"]
BRANCHY = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]
SPECIAL = 700  # ids behind the codes


def words(codes):
    """A tokenizer of three words; a caption's "<racm3:break>" is a special token, as in the checkpoints."""
    names = {"<unk>": 3, "a": codes + 10, "b": codes + 11, "c": codes + 12}
    names |= {f"IMGIMG{''.join('ABCDEFGHIJ'[int(digit)] for digit in str(code))}Z": code + 4 for code in range(codes)}
    tokenizer = Tokenizer(WordLevel(names, "<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<racm3:break>"])
    return tokenizer


@functools.lru_cache(maxsize=32)
def _pair(layout="lumina", image_size=(32, 32), codes=3, size=16, sharpness=1.5, seed=0):
    shape = TransformerConfig(size, 1, 2, 24, qk_norm=True)
    config = ChameleonConfig(shape, layout, image_size, codes, codes + SPECIAL, prompt_slots=22)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        target = Chameleon(config, words(codes))
        ends = target.ends()
        draft = EagleConfig(
            TransformerConfig(size, 1, 2, 24), target.codebook_size, 22, target.image_tokens, target="unsaved"
        )
        head = EagleHead(draft, ends["embedding"], ends["lm_head"], ends["rope"])
    with torch.no_grad():
        for model in (target, head):
            for name, parameter in model.named_parameters():
                if name.endswith("norm.bias"):
                    parameter.normal_(std=0.3, generator=generator)
                elif parameter.ndim == 2 and "qk_norm" not in name:
                    scale = sharpness if model is target else 0.5
                    parameter.normal_(std=scale / math.sqrt(parameter.shape[1]), generator=generator)
        head.fc.weight[:, size:] = torch.eye(size)
    head.embedding, head.lm_head = target.ends()["embedding"], target.ends()["lm_head"]
    return target.eval().requires_grad_(False), head.eval().requires_grad_(False)


def decode(target, captions, *arguments, **options):
    return generate(target, captions, *arguments, decode_images=False, **options)


# ------------------------------------------------------------------------------------ numbers of the public code


def golden(extra=""):
    """Our target with the golden weights, what went in, and what came out, on Lumina's qk-norms where extra says so."""
    facts = json.loads((PARITY / "chameleon_a.json").read_text())["config"]
    given = load_file(PARITY / "chameleon_a.safetensors")
    out = load_file(PARITY / f"{extra}.safetensors") if extra else given
    weights = {name[3:]: value for name, value in {**given, **out}.items() if name.startswith("sd.")}
    shape = TransformerConfig(
        facts["hidden_size"], facts["num_hidden_layers"], facts["num_attention_heads"], facts["intermediate_size"],
        norm_eps=facts["rms_norm_eps"], qk_norm=True,
    )  # fmt: skip
    config = ChameleonConfig(shape, "anole", (64, 64), 64, facts["vocab_size"], prompt_slots=9)
    target = Chameleon(config, None)
    target.load_state_dict(ours(weights.__getitem__, config))
    return target.eval().requires_grad_(False), given, out


@pytest.mark.parametrize("extra", ["", "chameleon_lumina_qknorm_a"])
def test_numbers_are_those_of_the_public_code(extra):
    target, given, out = golden(extra)
    hidden = target.transformer(target.embedding(given["in.input_ids"]), target.rope[None, :15])
    torch.testing.assert_close(hidden, out["out.last_hidden_state"], rtol=0, atol=1e-5)
    torch.testing.assert_close(target.lm_head(hidden), out["out.logits"][..., 4:68], rtol=0, atol=1e-4)
    # a tree of 7 nodes behind a cached prefix
    cache = target.transformer.new_cache(2, 16)
    flat, mask = cache.place(9)
    target.transformer(target.embedding(given["in.prefix_ids"]), target.rope[None, :9], mask, cache, flat)
    cache.keep(None, torch.full_like(cache.length, 9), 9)
    parent = tuple(given["in.tree_parents"].tolist())
    flat, mask = cache.place(7, ancestors(parent, torch.device("cpu")))
    rope = target.rope[given["in.tree_position_ids"]]
    hidden = target.transformer(target.embedding(given["in.tree_ids"]), rope, mask, cache, flat)
    torch.testing.assert_close(hidden, out["out.tree_hidden"], rtol=0, atol=1e-5)
    if not extra:
        torch.testing.assert_close(target.lm_head(hidden), out["out.tree_logits"][..., 4:68], rtol=0, atol=1e-4)
        held = cache.stores[0].view(2, 16, 2, 4, 16).permute(2, 0, 3, 1, 4)
        keys = held[0].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)  # theirs turns halves, ours pairs
        torch.testing.assert_close(keys, out["out.layer0_key"], rtol=0, atol=1e-5)
        torch.testing.assert_close(held[1], out["out.layer0_value"], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def golden_drafter(tmp_path_factory):
    """LANTERN's drafter for Lumina through `coolsd convert`: (head, inputs and outputs)."""
    folder = tmp_path_factory.mktemp("drafter")
    facts = json.loads((PARITY / "drafter_chameleon_a.json").read_text())["config"]
    numbers = load_file(PARITY / "drafter_chameleon_a.safetensors")
    (folder / "theirs").mkdir()
    (folder / "theirs" / "config.json").write_text(json.dumps(facts))
    weights = {name[3:]: value for name, value in numbers.items() if name.startswith("sd.")}
    torch.save(weights, folder / "theirs" / "pytorch_model.bin")
    shape = TransformerConfig(facts["hidden_size"], 3, 4, 112, qk_norm=True)
    config = ChameleonConfig(shape, "anole", (64, 64), 64, facts["vocab_size"], prompt_slots=9)
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text(json.dumps(config.to_json()))
    out = folder / "ours"
    more = ["--target", str(folder / "target"), "--pairing", "next"]
    assert main(["convert", str(folder / "theirs"), "--out", str(out), *more]) == 0
    target = Chameleon(config, None)
    ends = {**target.ends(), "lm_head": numbers["in.head"][4:68]}
    with pytest.warns(UserWarning, match="does not say which target"):
        head = coolsd.heads.checkpoint.read_head(out, ends, "any@0")
    return head.eval().requires_grad_(False), numbers


def test_lanterns_drafter_converts_to_the_same_numbers(golden_drafter):
    head, numbers = golden_drafter
    assert head.config.input_norm and head.config.bias and head.config.transformer.qk_norm
    ids, hidden = 64 + numbers["in.ids"], numbers["in.hidden"]  # any id, by its row of the whole vocabulary
    torch.testing.assert_close(head(ids, hidden, head.rope[None, :13]), numbers["out.tf"], rtol=0, atol=1e-5)
    codes = numbers["in.ids"] - 4
    image = (codes >= 0) & (codes < 64)
    mixed = torch.where(image, codes, ids)  # an image token's own row is the same
    assert bool(image.any())
    torch.testing.assert_close(head(mixed, hidden, head.rope[None, :13]), numbers["out.tf"], rtol=0, atol=1e-5)
    seen = numbers["in.padmask"].bool()
    mask = (torch.ones(13, 13, dtype=torch.bool).tril() & seen[:, None] | torch.eye(13, dtype=torch.bool))[:, None]
    padded = head(ids, hidden, head.rope[None, :13], mask)
    torch.testing.assert_close(padded[seen], numbers["out.tf_padmask"][seen], rtol=0, atol=1e-5)


@pytest.mark.parametrize("prepared", [False, True])
def test_lanterns_cached_levels_are_the_same(golden_drafter, prepared):
    head, numbers = golden_drafter
    head = head.prepare() if prepared else head.to(torch.float32)
    valid = numbers["in.cfg_mask"].bool()
    cache = head.transformer.new_cache(2, 24, valid)
    position = numbers["out.prefix_pos"].clamp(min=0)
    flat, mask = cache.place(13)
    hidden = head(64 + numbers["in.ids"], numbers["in.hidden"], head.rope[position], mask, cache, flat)
    torch.testing.assert_close(hidden[valid], numbers["out.prefix"][valid], rtol=0, atol=1e-5)
    cache.keep(None, torch.full_like(cache.length, 13), 13)
    above, last = numbers["in.parents2"], position[:, -1:]
    first = torch.eye(4, dtype=torch.bool)
    flat, mask = cache.place(4, first)
    hidden = head(
        64 + numbers["in.tree_ids1"], hidden[:, -1:].expand(-1, 4, -1), head.rope[last + 1], mask, cache, flat
    )
    torch.testing.assert_close(hidden, numbers["out.tree1"], rtol=0, atol=1e-5)
    flat, mask = cache.place(4, torch.cat([first[above], first], 1))
    hidden = head(64 + numbers["in.tree_ids2"], hidden[:, above], head.rope[last + 2], mask, cache, flat)
    torch.testing.assert_close(hidden, numbers["out.tree2"], rtol=0, atol=1e-5)


# -------------------------------------------------------------------------------- transformers' own modules


def published(folder, shards=None, codes=5, change=None, special=SPECIAL, **settings):
    """A tiny random Chameleon of transformers, written as its shards and index; qk-norms per head or per `shards`."""
    names = {f"IMGIMG{'ABCDEFGHIJ'[code]}Z": code + 4 for code in range(codes)} | {"<image>": codes + 519}
    pixels = {"num_embeddings": codes, "embed_dim": 8, "latent_channels": 8, "base_channels": 32, "resolution": 16,
              "channel_multiplier": [1, 1], "num_res_blocks": 1}  # fmt: skip
    config = TheirConfig(
        vocab_size=codes + special, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, vocabulary_map=names, vq_config=pixels, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = ChameleonForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "_norm" in name or parameter.ndim == 2:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    weights = {name: value.clone() for name, value in theirs.state_dict().items()}
    for name in [name for name in weights if "q_norm" in name or "k_norm" in name] if shards else []:
        rows = len(weights[name])
        weights[name] = weights[name][:shards].clone()
        whole = weights[name].repeat_interleave(rows // shards, 0)
        functools.reduce(getattr, name.split(".")[:-1], theirs)._parameters[name.split(".")[-1]].data.copy_(whole)
    folder.mkdir()
    files, ordered = {}, sorted(weights)
    for part in range(3):
        held = ordered[part::3]
        save_file({name: weights[name] for name in held}, folder / f"model-{part}.safetensors", {"format": "pt"})
        files |= dict.fromkeys(held, f"model-{part}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **(change or {})}))
    words(codes).save(str(folder / "tokenizer.json"))
    return theirs


@pytest.mark.parametrize("shards", [None, 1, 2])
@pytest.mark.parametrize("layout", ["lumina", "anole"])
def test_a_hugging_face_folder_loads_to_transformers_numbers(tmp_path, rng, layout, shards):
    theirs = published(tmp_path / "theirs", shards)
    size = ["--image_size", "[64, 32]"]
    arguments = ["convert", str(tmp_path / "theirs"), "--layout", layout, *size, "--out", str(tmp_path / "ours")]
    assert main(arguments) == 0
    target = coolsd.load_target(tmp_path / "ours", "cpu", "float32")
    assert target.fingerprint.startswith("ours@") and target.image_tokenizer is None
    prompt = target.encode(CAPTIONS, guidance=True)
    tokens = torch.randint(5, (4, target.image_tokens), generator=rng)
    if target.layout is not None:
        tokens = torch.where(target.layout.forced < 0, tokens, target.layout.forced)
    forced = target.forced(prompt, tokens)
    lead, ids = len(target.config.start), target.image_ids(tokens)
    for row in range(4):
        for branch in range(2):
            held = prompt.mask[row, branch]
            before = prompt.inputs["ids"][row, branch][held]
            assert before[-lead:].tolist() == ids[row, :lead].tolist() == target.config.start
            whole = torch.cat([before, ids[row, lead:-1]])[None]
            with torch.no_grad():
                hidden = theirs.model(input_ids=whole).last_hidden_state[0]
                logits = theirs.lm_head(hidden)[len(before) - 1 : -1, target.vocabulary_ids]
            mine = forced.hidden_states[row, branch, len(held) - len(before) :]
            torch.testing.assert_close(mine, hidden, rtol=0, atol=1e-5)
            allowed = forced.logits[row, branch] > torch.finfo().min
            torch.testing.assert_close(forced.logits[row, branch][allowed], logits[allowed], rtol=0, atol=1e-4)
            assert allowed.sum(-1).tolist() == [1 if token == 5 else 5 for token in tokens[row].tolist()]


def test_cached_steps_and_trees_equal_the_teacher_forced_pass(rng):
    target, _ = _pair(image_size=(64, 32), codes=5)
    prompt = target.encode(CAPTIONS, guidance=True)
    tokens = torch.randint(5, (4, target.image_tokens), generator=rng)
    forced = target.forced(prompt, tokens)
    output, cache = target.prefill(prompt, 7)
    torch.testing.assert_close(output.hidden_states, forced.hidden_states[:, :, :22], rtol=0, atol=1e-5)
    torch.testing.assert_close(output.logits[:, :, 0], forced.logits[:, :, 0], rtol=0, atol=1e-4)
    start, none = 0, torch.empty(4, 0, 6)
    for count in (1, 4, 1):
        output = target.score(DraftTree(tokens[:, start : start + count], chain(count - 1), none), prompt, cache)
        behind = slice(22 + start, 22 + start + count)
        torch.testing.assert_close(output.hidden_states, forced.hidden_states[:, :, behind], rtol=0, atol=1e-5)
        wanted = forced.logits[:, :, start + 1 : start + count + 1]
        torch.testing.assert_close(output.logits, wanted, rtol=0, atol=1e-4)
        start += count
        cache.keep(None, torch.full_like(cache.length, count), 22 + start)
    cache.length[6:] -= 1  # one row falls back
    parent = (-1, 0, 0, 1, 1, 2, 4)
    tree = DraftTree(torch.randint(5, (4, 7), generator=rng), parent, none)
    output = target.score(tree, prompt, cache)
    for row, held in enumerate((6, 6, 6, 5)):
        before = tokens[row, :held]
        alone = target.encode(CAPTIONS[row : row + 1], guidance=True)
        for node in range(7):
            path = ancestors(parent, torch.device("cpu"))[node].nonzero().flatten()
            whole = torch.cat([before, tree.tokens[row, path], torch.zeros(1, dtype=torch.long)])[None]
            wanted = target.forced(alone, whole)
            torch.testing.assert_close(output.logits[row, :, node], wanted.logits[0, :, -1], rtol=0, atol=1e-4)


def test_the_unconditional_branch_counts_its_own_positions(tmp_path):
    lumina, anole = _pair()[0], _pair("anole")[0]
    ids = lumina.encode(["a b", "a"], guidance=True)
    assert ids.inputs["ids"][0, 1, -3:].tolist() == [8, 616, 616] and ids.mask[:, 1].sum(-1).tolist() == [3, 3]
    assert ids.mask[0, 0].sum() == ids.mask[1, 0].sum() + 1
    assert ids.inputs["ids"][0, 0, -6:].tolist() == [13, 14, 521, 8, 616, 616]
    assert anole.encode(["a"], True).inputs["ids"][0, 0, -4:].tolist() == [0, 13, 521, 8]
    assert anole.encode(["a"], True).inputs["ids"][0, 1, -2:].tolist() == [0, 8]
    # what looks like a special token in a caption is text
    words(3).save(str(tmp_path / "tokenizer.json"))
    special, read = words(3), read_tokenizer(tmp_path / "tokenizer.json", lumina.config)
    one = special.encode("<racm3:break>", add_special_tokens=False).ids
    assert len(one) == 1 and one[0] not in read.encode("<racm3:break>", add_special_tokens=False).ids
    with pytest.raises(ValueError, match="prompt slots; shorten it"):
        lumina.encode(["a " * 40], False)
    assert lumina.problem("a " * 40) == "too many tokens" and lumina.problem("a") is None


# ---------------------------------------------------------------------------------------------------- the layout


def test_the_published_layout_is_reproduced():
    facts = json.loads((PARITY / "lumina_layout.json").read_text())
    for grid in facts["grids"].values():
        shape = TransformerConfig(8, 1, 1, 8, qk_norm=True)
        size = (16 * grid["w_latent"], 16 * grid["h_latent"])
        target = Chameleon(ChameleonConfig(shape, "lumina", size, vocabulary=9000, prompt_slots=8), None)
        count = target.image_tokens
        logits = target.layout.constrain(torch.zeros(1, 1, count, 8193), torch.arange(count)[None])[0, 0]
        found = []
        for place in range(count):
            ids = target.vocabulary_ids[logits[place] == 0].tolist()
            found.append("image" if ids == list(range(4, 8196)) else ids[0] if len(ids) == 1 else ids)
        end = int(target.image_ids(torch.zeros(1, count, dtype=torch.long))[0, -1])
        assert [*found, end] == grid["allowed"]
    for side, size in facts["sizes"].items():
        config = ChameleonConfig(TransformerConfig(8, 1, 1, 8, qk_norm=True), "lumina", (int(side), int(side)))
        assert config.start == [8197, size["grid_token"], size["grid_token"]]
        assert config.grid[0] * config.grid[1] == size["with_eol"] and config.end_of_image == 8196
        assert config.separator == size["plus_eot_8710"] - size["total_incl_eoi"] + 8709


def obeys(ids, width, height, codes):
    """The grammar of a Lumina image, read token by token."""
    ids = list(ids)
    assert ids[:3] == [codes + 5, codes + 612 + height // 32, codes + 612 + width // 32]
    rest = ids[3:]
    for _ in range(height // 16):
        line, rest = rest[: width // 16], rest[width // 16 :]
        assert all(4 <= token < 4 + codes for token in line)
        assert rest.pop(0) == codes + 611
    assert rest == [codes + 4]


SIZES = [(32 * a, 32 * b) for a in range(1, 5) for b in range(1, 5)] + [(160, 64), (64, 160), (192, 64), (96, 192)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_every_sequence_obeys_the_grammar(width, height):
    target, head = _pair(image_size=(width, height), codes=4)
    drafter = [Chain(head, 5), StaticTree(head, BRANCHY), DynamicTree(head, 9, 3, 2), Jacobi(6)][
        (width + height) // 32 % 4
    ]
    for arguments in ((), (drafter, CoolSD(1.3))):
        result = decode(target, ["a b", "c"], *arguments, sampling=Sampling(guidance=2.0, top_k=3))
        for row in target.image_ids(result.tokens).tolist():
            obeys(row, width, height, 4)


@pytest.mark.parametrize("sampling", [Sampling(guidance=2.0), Sampling(temperature=0, guidance=3.0)], ids=str)
@pytest.mark.parametrize("rule", [Uniform(0.05), CoolSD(1.1)], ids=str)
def test_forced_tokens_never_count_as_rejections(sampling, rule):
    target, head = _pair(image_size=(64, 64), codes=4)
    passed = 0
    for drafter in (
        Chain(head, 6),
        StaticTree(head, BRANCHY),
        DynamicTree(head, 9, 3, 2),
        Jacobi(7),
        Jacobi(5, "repeat"),
    ):
        rounds = []
        result = decode(target, CAPTIONS, drafter, rule, sampling, observer=rounds.append)
        count = torch.ones(4, dtype=torch.long)
        for seen in rounds:
            accepted = seen.verification.emitted - 1
            count = count + seen.verification.emitted
            for row in range(4):
                if not seen.active[row] or count[row] == target.image_tokens:
                    continue
                forced = seen.tree.forced[row]
                parent = torch.as_tensor(seen.tree.parent).expand(4, -1)[row]
                if (parent == seen.verification.path[row, accepted[row]]).any():  # else there was none to refuse
                    assert forced[accepted[row]] < 0
                passed += int((forced[: accepted[row]] >= 0).sum())
        total, free, calls = 20, 16, result.target_calls.float()
        torch.testing.assert_close(result.accepted_length, (total - 1) / calls)
        torch.testing.assert_close(result.accepted_length_unforced, (free - 1) / calls)
        assert bool((result.accepted_length_unforced < result.accepted_length).all())
    assert passed > 20


@pytest.mark.parametrize("rule", [coolsd.Lantern(2, 0.5, "own"), coolsd.LanternPP(2, 3.0), coolsd.Grouped(2)], ids=str)
def test_rules_that_look_at_other_tokens_never_take_a_line_end_for_a_code(rule):
    target, head = copy.deepcopy(_pair(image_size=(64, 32), codes=4))
    torch.manual_seed(0)
    pixels = VQGAN(VQGANConfig(4, 3, 8, 32, (1,), 1))
    object.__setattr__(target, "image_tokenizer", pixels)
    assert torch.equal(target.codebook()[:4], pixels.raw_codebook())
    for drafter in (Chain(head, 5), StaticTree(head, BRANCHY), DynamicTree(head, 9, 3, 2), Jacobi(5)):
        for certificates in (True, False):
            result = decode(target, CAPTIONS, drafter, rule, Sampling(guidance=2.0), certificates=certificates)
            for row in target.image_ids(result.tokens).tolist():
                obeys(row, 64, 32, 4)


def test_a_replay_accepts_forced_tokens_whatever_w_is():
    target, head = _pair(image_size=(32, 64), codes=4)
    recorder = Recorder(target.image_tokens)
    decode(target, CAPTIONS * 8, Chain(head, 4), Uniform(0.3), observer=recorder)
    record = recorder.record()
    forced = record.target_mass[:, 0] == 1  # [L, R]: certain, and counted as a token that the draft gave too little
    assert 0.1 < float(forced.float().mean()) < 0.6
    for w in (0.01, 0.3, 2.0):
        accepted, bias, _, _ = Replay(record).test(0, torch.tensor([w]))
        assert bool((accepted[0][forced[0]] == 1).all()) and not bias[0][forced[0]].any()
        assert w > 1 or bool((accepted[0][~forced[0]] <= w + 1e-6).all())


def test_a_target_without_a_layout_reports_one_accepted_length(toy):
    target, head = _pair("anole", codes=4)
    assert target.layout is None and target.codebook_size == 4 and target.image_tokens == 4
    assert decode(target, ["a"], Chain(head, 2), Vanilla()).accepted_length_unforced is None
    assert decode(toy()[0], ["a"]).accepted_length_unforced is None


def test_drafts_obey_the_layout_too(rng):
    layout = Layout(torch.tensor([-1, -1, 5, -1, 5]), 5)
    assert layout.at(torch.tensor([[0, 2, 4, 5, 99]])).tolist() == [[-1, 5, 5, -1, -1]]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = (torch.randn(2, 2, 5, 6, generator=rng) * 5).to(dtype)
        free = layout.constrain(logits, torch.arange(5)[None])
        for temperature in (0.0, 0.1, 1.0, 5.0):
            for top_k in (0, 2):
                probs = Sampling(temperature, top_k, 0.9, 7.5).probs(free)
                assert bool(probs.isfinite().all()) and not probs[:, [0, 1, 3], 5].any()
                assert torch.equal(probs[:, [2, 4]], torch.eye(6)[5].expand(2, 2, 6))


def test_plain_decoding_is_autoregressive_and_a_batch_is_its_rows():
    target, head = _pair(image_size=(64, 32), codes=4)
    for sampling in (Sampling(), Sampling(guidance=2.0, top_k=3)):
        plain = decode(target, CAPTIONS, sampling=sampling, seed=3)
        assert torch.equal(plain.tokens, autoregressive(target, CAPTIONS, sampling, seed=3))
        assert torch.equal(plain.accepted_length, torch.ones(4))
        both = decode(target, CAPTIONS, Chain(head, 4), CoolSD(1.5), sampling, seed=3, rows=[4, 0, 7, 2])
        for index, row in enumerate((4, 0, 7, 2)):
            alone = decode(target, CAPTIONS[index : index + 1], Chain(head, 4), CoolSD(1.5), sampling, 3, [row])
            assert torch.equal(alone.tokens[0], both.tokens[index])


# ------------------------------------------------------------------------------------------------------- the law


def law_and_counts(target, sampling, images, *arguments):
    """Exact probability of each of the images that the layout allows, and how often `generate` made it."""
    free = (target.layout.forced < 0).nonzero().flatten()
    drawn = torch.cartesian_prod(*[torch.arange(target.config.codes)] * len(free))
    tokens = target.layout.forced.clamp(min=0).expand(len(drawn), -1).clone()
    tokens[:, free] = drawn
    prompt = target.encode(["a b"] * len(tokens), sampling.branches == 2)
    probs = sampling.probs(target.forced(prompt, tokens).logits)
    law = probs.double().gather(-1, tokens[..., None]).squeeze(-1).prod(-1)
    result = decode(target, ["a b"] * images, *arguments, sampling, seed=8)
    base = target.config.codes ** torch.arange(len(free)).flip(0)
    assert torch.equal(
        result.tokens[:, target.layout.forced >= 0], tokens[:1].expand(images, -1)[:, target.layout.forced >= 0]
    )
    return law, (result.tokens[:, free] * base).sum(1).bincount(minlength=len(law)), result


@pytest.mark.parametrize("kind", ["chain", "tree", "jacobi"])
def test_constraints_and_guidance_are_lossless(p_value, liar, kind):
    target, head = _pair(sharpness=1.0)
    drafter = {"chain": Chain(head, 3), "tree": StaticTree(head, BRANCHY), "jacobi": Jacobi(4)}[kind]
    sampling = Sampling(guidance=2.0)
    law, counts, result = law_and_counts(target, sampling, 5_000, drafter, Vanilla())
    assert abs(float(law.sum()) - 1) < 1e-5 and float(law.max()) < 0.5
    assert p_value(counts, law) > 1e-3
    assert not result.bias_per_token.any() and float(result.accepted_length.mean()) > 1.5
    if kind == "chain":  # negative controls: a wrong q, a relaxed rule
        for arguments in ((liar(drafter, 0.3), Vanilla()), (drafter, Uniform(2.0))):
            assert p_value(law_and_counts(target, sampling, 3_000, *arguments)[1], law) < 1e-6


# ------------------------------------------------------------------------------------------------ pixels and files


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A converted Lumina of 64 x 32 pixels with its image tokenizer: (folder of theirs, folder of ours)."""
    folder = tmp_path_factory.mktemp("chameleon")
    published(folder / "theirs")
    torch.manual_seed(1)
    pixels = VQGAN(VQGANConfig(5, 8, 8, 32, (1, 1), 1))
    torch.save({"state_dict": pixels.state_dict()}, folder / "vqgan.ckpt")
    more = ["--layout", "lumina", "--image_size", "[64, 32]", "--tokenizer", str(folder / "vqgan.ckpt")]
    assert main(["convert", str(folder / "theirs"), "--out", str(folder / "ours"), *more]) == 0
    return folder / "theirs", folder / "ours"


def test_images_become_tokens_and_tokens_images(converted, rng):
    target = coolsd.load_target(converted[1], "cpu", "float32", verify=True)
    assert (target.rows, target.columns, target.image_tokens) == (2, 5, 10)
    images = torch.randint(0, 256, (2, 3, 4, 8), generator=rng, dtype=torch.uint8)  # this tokenizer halves sides
    tokens = target.encode_images(images)
    assert tokens.shape == (2, 10) and tokens[:, [4, 9]].eq(5).all() and tokens[:, :4].lt(5).all()
    codes = tokens.view(2, 2, 5)[:, :, :4].flatten(1)
    assert torch.equal(target.decode_images(tokens), target.image_tokenizer.decode_images(codes, (2, 4)))
    result = generate(target, ["a"], sampling=Sampling(guidance=2.0))
    assert result.images.shape == (1, 3, 4, 8) and target.codebook().shape == (6, 8)
    lantern = generate(target, ["a"], Jacobi(4), coolsd.Lantern(3, 0.5), decode_images=False)
    assert bool((lantern.tokens[:, [4, 9]] == 5).all())
    assert target.codebook() is target.codebook() and not target.codebook().is_inference()  # so hashed once
    with pytest.raises(ValueError, match="images are 4 x 8 pixels, but the target's are 64 x 32"):
        target.encode_images(images.transpose(2, 3))  # as many codes


def test_a_target_that_gives_nan_says_so(converted):
    target = coolsd.load_target(converted[1], "cpu", "float32")
    target.transformer.norm.weight.data[0] = math.nan
    with pytest.raises(ValueError, match=r"no numbers \(NaN\) in torch.float32"):
        generate(target, ["a"])


def test_an_image_tokenizer_of_another_model_is_refused(converted, tmp_path):
    shutil.copytree(converted[1], tmp_path / "ours")
    VQGAN(VQGANConfig(4, 8, 8, 32, (1, 1), 1)).save(tmp_path / "ours" / "image_tokenizer")
    with pytest.raises(ValueError, match=r"image_tokenizer has 4 codes, but .*ours has 5; put its own there"):
        coolsd.load_target(tmp_path / "ours", "cpu")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"heads": 0}, "heads is 0, but must be an integer >= 1"),
        ({"layers": "2"}, "layers is '2'"),
        ({"norm_eps": "x"}, "norm_eps is 'x'"),
        ({"kv_heads": -1}, "kv_heads is -1"),
        ({"hidden_size": 1 << 30}, "config.json tells of"),
        ({"rope_base": "x"}, "rope_base is 'x'"),
    ],
)
def test_a_hostile_config_is_one_sentence(converted, tmp_path, change, said):
    shutil.copytree(converted[1], tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    (config if "rope_base" in change else config["transformer"]).update(change)
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config))
    names = [
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        *(f"model-{n}.safetensors" for n in "012"),
    ]
    write_fingerprint(tmp_path / "ours", names)
    with pytest.raises(ValueError, match=said):
        coolsd.load_target(tmp_path / "ours", "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_layout_and_stays_near(converted, dtype):
    single, half = (coolsd.load_target(converted[1], "cpu", kind) for kind in (torch.float32, dtype))
    assert half.dtype == dtype and half.rope.dtype == torch.float32
    sampling = Sampling(0.5, guidance=3.0)
    tokens = decode(half, CAPTIONS, Jacobi(4), CoolSD(1.5), sampling).tokens
    assert bool((tokens[:, [4, 9]] == 5).all())
    laws = [sampling.probs(model.forced(model.encode(CAPTIONS, True), tokens).logits) for model in (single, half)]
    assert 0 < float((laws[0] - laws[1]).abs().max()) < 0.1


def test_generate_estimates_its_memory_and_tells_both_lengths(converted, tmp_path, capfd):
    stored = [load_file(path) for path in converted[1].glob("model*.safetensors")]  # not the neighbours beside them
    ours_only = [tensor for file in stored for name, tensor in file.items() if ".vqmodel." not in name]
    assert numbers_stored(converted[1]) == sum(map(torch.Tensor.numel, ours_only))
    arguments = ["generate", "a b", "--plain", "--target", str(converted[1]), "--device", "cpu"]
    assert main([*arguments, "--sampling.guidance", "2", "--out", str(tmp_path)]) == 0
    image = json.loads((tmp_path / "stats.json").read_text())["images"][0]
    assert image["accepted_length"] == 1.0 and image["accepted_length_unforced"] == pytest.approx(7 / 9)
    assert "GB free beside target and head: batches of 1" in capfd.readouterr().out


def test_evaluate_tells_both_lengths(converted, tmp_path):
    (tmp_path / "prompts.txt").write_text("a b\nc\n")
    methods = "[{name: sjd, rule: cool-sd, drafter: sjd, length: 4}]"
    arguments = ["evaluate", "--target", str(converted[1]), "--prompts", str(tmp_path / "prompts.txt")]
    more = ["--methods", methods, "--sampling.guidance", "2", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main([*arguments, *more]) == 0
    plain, sjd = json.loads((tmp_path / "run" / "results.json").read_text())["rows"]
    for row in (plain, sjd):
        shorter = row["accepted_length_unforced"]["mean"] / row["accepted_length"]["mean"]
        assert shorter == pytest.approx(7 / 9, rel=1e-4)
    assert "unforced)" in (tmp_path / "run" / "table.md").read_text()


def test_files_are_linked_and_the_rest_of_the_repository_is_left_out(converted):
    theirs, mine = converted
    assert (mine / "model-0.safetensors").samefile(theirs / "model-0.safetensors")
    report = json.loads((mine / "convert.json").read_text())
    assert report["format"] == "chameleon" and all(name.startswith("model.vqmodel.") for name in report["unused"])


def test_a_head_trains_on_this_family_by_the_same_commands(converted, tmp_path):
    torch.manual_seed(0)
    cache = str(tmp_path / "features")
    (tmp_path / "images").mkdir()
    from PIL import Image

    for index in range(6):
        pixels = torch.randint(0, 256, (4, 8, 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(tmp_path / "images" / f"{index}.png")
        (tmp_path / "images" / f"{index}.txt").write_text("a b c"[: 1 + 2 * (index % 3)])
    common = ["--trainer.accelerator", "cpu", "--seed_everything", "0"]
    extract = ["extract", "--model.cache", cache, "--model.target", str(converted[1]), "--model.dtype", "float32",
               "--model.source", "self-distill", "--model.samples_per_shard", "4", "--data.batch_size", "2",
               "--data.dataset", "data.captions.ImageCaptionPairs", "--data.dataset.source", str(tmp_path / "images"),
               "--data.dataset.size", "4", *common]  # fmt: skip
    assert main(extract) == 0
    fit = ["fit", "--model", "training.draft.DraftTraining", "--model.guidance", "2.0", "--data",
           "data.loader.FeatureModule", "--data.cache", cache, "--data.batch_size", "2", "--trainer.max_steps", "2",
           "--out", str(tmp_path / "run"), *common]  # fmt: skip
    assert main(fit) == 0
    target = coolsd.load_target(converted[1], "cpu", "float32")
    head = coolsd.load_head(tmp_path / "run" / "export" / "draft", target)
    result = decode(target, ["a"], coolsd.Chain(head, 3), coolsd.CoolSD(), Sampling(guidance=2.0))
    assert result.tokens[0, [4, 9]].tolist() == [5, 5]


MEASURE = """
import re, sys, coolsd, torch
from coolsd.targets.chameleon import Chameleon, ChameleonConfig, TransformerConfig
with torch.device("meta"):  # what is imported for it, whatever the size
    Chameleon(ChameleonConfig(TransformerConfig(8, 1, 1, 8, qk_norm=True), "anole", (32, 32)), None)
coolsd.load_target("emoji/target", "cpu", "bfloat16")
now = lambda name: 1024 * int(re.search(name + r":\\s*(\\d+) kB", open("/proc/self/status").read())[1])
before = now("VmRSS")
target = coolsd.load_target(sys.argv[1], "cpu", "bfloat16")
sum(p.flatten()[::1024].sum() for p in target.parameters())  # touch every page
print(now("VmHWM") - before, sum(p.nbytes for p in target.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_no_more_memory_than_the_checkpoint_and_a_bit(tmp_path):
    folder, size, wide, layers, vocabulary = tmp_path / "theirs", 768, 2048, 10, 8900
    folder.mkdir()
    layer = {f"self_attn.{name}_proj.weight": (size, size) for name in "qkvo"}
    layer |= {f"self_attn.{name}_norm.{part}": (1, 64) for name in "qk" for part in ("weight", "bias")}
    layer |= {"mlp.gate_proj.weight": (wide, size), "mlp.up_proj.weight": (wide, size)}
    layer |= {"mlp.down_proj.weight": (size, wide), "input_layernorm.weight": (size,)}
    layer |= {"post_attention_layernorm.weight": (size,)}
    files, total = {}, 0
    for part in range(3):
        tensors = {f"model.layers.{index}.{name}": torch.ones(shape, dtype=torch.bfloat16)
                   for index in range(layers)[part::3] for name, shape in layer.items()}  # fmt: skip
        if part == 0:
            tensors |= {name: torch.ones(vocabulary, size, dtype=torch.bfloat16) for name in (
                "lm_head.weight", "model.embed_tokens.weight")}  # fmt: skip
            tensors["model.norm.weight"] = torch.ones(size, dtype=torch.bfloat16)
        save_file(tensors, folder / f"m-{part}.safetensors")
        files |= dict.fromkeys(tensors, f"m-{part}.safetensors")
        total += sum(tensor.nbytes for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    config = {"model_type": "chameleon", "vocab_size": vocabulary, "hidden_size": size, "intermediate_size": wide,
              "num_hidden_layers": layers, "num_attention_heads": 12}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    words(8192).save(str(folder / "tokenizer.json"))
    assert main(["convert", str(folder), "--layout", "anole", "--out", str(tmp_path / "ours")]) == 0
    shown = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "ours")], capture_output=True, text=True, check=True
    ).stdout
    taken, held = map(int, shown.split())
    print(f"checkpoint {total / 1e6:.0f} MB, weights {held / 1e6:.0f} MB, most memory {taken / 1e6:.0f} MB")
    assert total > 1.5e8 and taken <= 1.15 * total


# ------------------------------------------------------------------------------------------------------- pairings


def trained(target, pairing, steps=80):
    """A head that reads the caption, trained for a moment on the target's own images with one pairing."""
    captions = [" ".join("abc"[(i >> k) % 3] for k in range(1 + i % 3)) for i in range(48)]
    tokens = decode(target, captions, seed=1).tokens
    prompt = target.encode(captions, False)
    output, slots = target.forced(prompt, tokens), target.config.prompt_slots
    config = EagleConfig(
        dataclasses.replace(target.config.transformer, qk_norm=True), target.codebook_size, slots, target.image_tokens,
        own_embedding=True, input_norm=True, text=target.config.vocabulary, pairing=pairing,
    )  # fmt: skip
    torch.manual_seed(2)
    head = make_head(config, target.ends())
    with torch.no_grad():
        head.text_embedding.copy_(target.embedding.weight)
    whole = torch.cat([target.codebook_size + prompt.inputs["ids"][:, 0], tokens], 1)
    read = whole[:, 1:] if pairing == "next" else whole[:, :-1]
    hidden = output.hidden_states[:, 0]
    length = read.shape[1]
    held = torch.cat([prompt.mask[:, 0], torch.ones_like(tokens, dtype=torch.bool)], 1)[:, :-1]
    mask = (torch.ones(length, length, dtype=torch.bool).tril() & held[:, None] | torch.eye(length, dtype=torch.bool))[
        :, None
    ]
    wanted = output.logits[:, 0, 1:].softmax(-1)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        predicted = head(read, hidden[:, :-1], head.rope[None, 1 : length + 1], mask)[:, slots - 1 : -1]
        loss = -(wanted * head.logits(predicted).log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval().requires_grad_(False)


def test_the_pairing_of_a_published_head_is_detected_and_decoded_with():
    target, _ = _pair("anole", (64, 64), codes=6, sharpness=4.0)
    for pairing, other in (("next", "same"), ("same", "next")):
        head = trained(target, pairing)
        found = agreement(head, target, "a b")
        print(pairing, found)
        assert found[pairing] > found[other] + 0.02
        lengths = {}
        for assumed in ("next", "same"):
            head.config = dataclasses.replace(head.config, pairing=assumed)
            for drafter in (Chain(head, 3), StaticTree(head, BRANCHY), DynamicTree(head, 9, 3, 2)):
                result = decode(target, CAPTIONS * 8, drafter, Vanilla())
                lengths[assumed, drafter.nodes, type(drafter)] = float(result.accepted_length.mean())
        for (assumed, *drafter), length in lengths.items():
            if assumed == pairing:
                assert length > lengths[(other, *drafter)]


# ---------------------------------------------------------------------------------------------- what is refused


SPOILT = {
    "norms": ("model.layers.0.self_attn.q_norm.weight", torch.ones(3, 8)),
    "no rows": ("model.layers.0.self_attn.q_norm.weight", torch.ones(0, 8)),
    "quantised": ("model.layers.0.mlp.up_proj.weight", torch.ones(40, 32, dtype=torch.int8)),
    "narrow": ("model.layers.0.self_attn.v_proj.weight", torch.ones(16, 31)),
    "scalar": ("lm_head.weight", torch.ones(())),
}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("shard", "names model-1.safetensors, which is not there"),
        ("index", "names nowhere.safetensors, which is not there"),
        ("outside", "names '../model-0.safetensors', which is not a plain file name"),
        ("no index", "has no weight_map"),
        ("damaged", "model-2.safetensors is not whole"),
        ("tokenizer", "has no tokenizer.json"),
        ("tensor", "lacks model.layers.1.mlp.up_proj.weight"),
        ("layers", "has 2 layers, but its config.json tells of 1000"),
        ("nonsense", "rope_parameters and vq_config must be objects"),
        ("codes", "codes is 1000000000, but must be an integer from 1 to 705"),
        ("other", "is no Chameleon: its config.json has model_type 'llama'"),
        ("swin", "normalises behind its layers (swin_norm"),
        ("vocabulary", "image code 1 (IMGIMGBZ) has id 6, but Chameleon's is 5"),
        ("layout", "give --layout lumina or anole"),
        ("size", "give --image_size"),
        ("odd size", "multiples of 32 pixels"),
        ("long size", "4 to 1"),
        ("large size", "1024 x 1024 pixels in area"),
        ("shape", "has shape"),
        ("norms", "must be one row per head or per shard"),
        ("rope", "scales its rotary positions"),
        ("small", "which needs ids up to"),
        ("no codes", "neither tokenizer.json nor vocabulary_map names 5 image codes"),
        ("many words", "has ids up to 9999, but the model has 705"),
        ("quantised", "model.layers.0.mlp.up_proj.weight is torch.int8"),
        ("narrow", "tensors do not have the shapes that its config.json tells of"),
        ("scalar", "tensors do not have the shapes that its config.json tells of"),
        ("no rows", "must be one row per head or per shard"),
        ("epsilon", "rms_norm_eps = 'x', but must have a positive number"),
        ("width", "model.embed_tokens.weight is [705, 32], but config.json tells of [705, 4194304]"),
    ],
)
def test_a_folder_that_is_none_is_one_sentence(tmp_path, capfd, kind, said):
    folder = tmp_path / "theirs"
    many = {"num_hidden_layers": 1000}
    change = {"layers": many, "nonsense": {"vq_config": [1]}, "codes": {"vq_config": {"num_embeddings": 10**9}},
              "other": {"model_type": "llama"}, "swin": {"swin_norm": True}, "shape": {"intermediate_size": 48},
              "rope": {"rope_scaling": {"type": "linear", "factor": 2.0}}, "no codes": {"vocabulary_map": {}},
              "epsilon": {"rms_norm_eps": "x"}, "width": {"hidden_size": 1 << 22}}  # fmt: skip
    published(folder, change=change.get(kind), special=300 if kind == "small" else SPECIAL)
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    layout, size = ["--layout", "lumina"], ["--image_size", "32"]
    if kind == "shard":
        (folder / "model-1.safetensors").unlink()
    elif kind in ("index", "outside"):
        name = "nowhere.safetensors" if kind == "index" else "../model-0.safetensors"
        index.write_text(json.dumps({"weight_map": {**files, "model.norm.weight": name}}))
    elif kind == "no index":
        index.write_text("{}")
    elif kind == "damaged":
        (folder / "model-2.safetensors").write_bytes(b"x" * 100)
    elif kind == "tokenizer":
        (folder / "tokenizer.json").unlink()
    elif kind == "tensor":
        del files["model.layers.1.mlp.up_proj.weight"]
        index.write_text(json.dumps({"weight_map": files}))
    elif kind == "vocabulary":
        config = json.loads((folder / "config.json").read_text())
        config["vocabulary_map"] |= {"IMGIMGBZ": 6, "IMGIMGCZ": 5}
        (folder / "config.json").write_text(json.dumps(config))
    elif kind in ("no codes", "many words"):
        names = {"<unk>": 0} if kind == "no codes" else {"<unk>": 9999, "IMGIMGAZ": 4, "IMGIMGEZ": 8}
        Tokenizer(WordLevel(names, "<unk>")).save(str(folder / "tokenizer.json"))
    elif kind in SPOILT:
        name, tensor = SPOILT[kind]
        held = load_file(folder / files[name])
        save_file({**held, name: tensor}, folder / files[name])
    layout = [] if kind == "layout" else layout
    size = {
        "size": [],
        "odd size": ["--image_size", "40"],
        "long size": ["--image_size", "[32, 160]"],
        "large size": ["--image_size", "[1024, 1056]"],
    }.get(kind, size)
    arguments = ["convert", str(folder), "--from", "chameleon", "--out", str(tmp_path / "ours")]
    assert main([*arguments, *layout, *size]) == 2
    sentence = capfd.readouterr().err.strip()
    assert said in sentence and "\n" not in sentence and not (tmp_path / "ours").exists()


def test_a_folder_of_ours_that_lost_a_shard_is_one_sentence(converted, tmp_path):
    folder = tmp_path / "ours"
    shutil.copytree(converted[1], folder)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-2.safetensors is not the file"):
        coolsd.load_target(folder, "cpu")
    with pytest.raises(ValueError, match="a published model becomes a target by coolsd convert"):
        coolsd.load_target(converted[0], "cpu")


def test_a_published_drafter_converts_with_its_target_and_decodes(converted, tmp_path, capfd):
    torch.manual_seed(5)
    size, wide = 32, 40
    shapes = {f"self_attn.{name}_proj.weight": (size if name in "qo" else 16, size) for name in "qkvo"}
    shapes |= {f"self_attn.{name}_norm.{part}": (1, 8) for name in "qk" for part in ("weight", "bias")}
    shapes |= {"mlp.gate_proj.weight": (wide, size), "mlp.up_proj.weight": (wide, size)}
    shapes |= {"mlp.down_proj.weight": (size, wide)}
    shapes |= {"input_layernorm.weight": (size,), "post_attention_layernorm.weight": (size,)}
    weights = {f"layers.0.{name}": torch.randn(shape) / 6 for name, shape in shapes.items()}
    weights |= {"embed_tokens.weight": torch.randn(705, size), "fc.weight": torch.randn(size, 2 * size) / 8}
    (tmp_path / "theirs").mkdir()
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "embed_upscale": 3.0}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    torch.save(weights, tmp_path / "theirs" / "pytorch_model.bin")
    arguments = ["convert", str(tmp_path / "theirs"), "--target", str(converted[1]), "--out", str(tmp_path / "ours")]
    assert main(arguments) == 0
    found = json.loads((tmp_path / "ours" / "convert.json").read_text())["agreement"]
    recorded = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert set(found) == {"next", "same"} and recorded["pairing"] == max(found, key=found.get)
    assert not recorded["bias"] and recorded["text"] == 705 and recorded["image_tokens"] == 10
    target = coolsd.load_target(converted[1], "cpu", "float32")
    with pytest.warns(UserWarning, match="only shapes were checked"):
        head = coolsd.load_head(tmp_path / "ours", target)
    torch.testing.assert_close(head.embedding, 3 * weights["embed_tokens.weight"][target.vocabulary_ids])
    for drafter in (Chain(head, 4), StaticTree(head, BRANCHY)):
        result = decode(target, ["a b", "c"], drafter, Vanilla(), Sampling(guidance=2.0))
        assert bool((result.tokens[:, [4, 9]] == 5).all()) and not result.bias_per_token.any()
    assert main(["convert", str(tmp_path / "ours"), "--to", "lantern-drafter", "--out", str(tmp_path / "back")]) == 2
    torch.save({**weights, "fc.weight": torch.ones(size, size)}, tmp_path / "theirs" / "pytorch_model.bin")
    capfd.readouterr()
    assert main([*arguments[:-1], str(tmp_path / "none"), "--pairing", "next"]) == 2
    assert "fc.weight" in capfd.readouterr().err and not (tmp_path / "none").exists()
    ends = {name: tensor.float() for name, tensor in target.ends().items()}
    data = SimpleNamespace(cache=SimpleNamespace(ends=lambda: ends, folder="cache", settings=SimpleNamespace(
        branches=2, target="any@0")))  # fmt: skip
    training = DraftTraining(start_from=str(tmp_path / "ours"), guidance=2.0)
    training._trainer = SimpleNamespace(strategy=None, datamodule=data)
    with pytest.raises(ValueError, match="by their tokens"), pytest.warns(UserWarning, match="only shapes"):
        training.configure_model()


def test_a_head_for_chameleon_needs_its_target_to_convert(tmp_path, golden_drafter, capfd):
    _, numbers = golden_drafter
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("{}")
    weights = {name[3:]: value.contiguous() for name, value in numbers.items() if name.startswith("sd.")}
    save_file(weights, tmp_path / "theirs" / "model.safetensors")
    assert main(["convert", str(tmp_path / "theirs"), "--out", str(tmp_path / "ours")]) == 2
    assert "give --target" in capfd.readouterr().err
