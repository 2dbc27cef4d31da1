"""What several test files share, as fixtures: toy targets with heads, seeded numbers, and the chi-square of a law.

Nothing here is imported by name: torch_fidelity installs a top-level package called `tests`.
"""

import copy
import dataclasses
import functools
import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from coolsd.heads.checkpoint import save_head
from coolsd.heads.eagle import EagleConfig, EagleHead
from coolsd.image_tokenizers.llamagen_vq import LlamaGenVQ, LlamaGenVQConfig
from coolsd.targets.captions import WordEncoder
from coolsd.targets.llamagen import LlamaGen, LlamaGenConfig
from coolsd.transformer import TransformerConfig

PARITY = Path(__file__).parent / "parity"
SAID = "said"  # a property of a test's report, which comes from a worker, too
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    torch.set_num_threads(1)
WORDS = {"[unknown]": 0, "a": 1, "b": 2, "c": 3}


@functools.lru_cache(maxsize=32)
def _toy(codes=5, grid=(3, 3), size=32, layers=2, sketch=3, seed=0, sharpness=3.0):
    generator = torch.Generator().manual_seed(seed)
    tokenizer = Tokenizer(WordLevel(WORDS, "[unknown]"))
    tokenizer.pre_tokenizer = Whitespace()
    config = LlamaGenConfig(TransformerConfig(size, layers, 2, 48), codes, grid, 4, 16, len(WORDS), sketch)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # biases keep torch's own initial values
        target = LlamaGen(config, WordEncoder(tokenizer, len(WORDS), 16))
        tokens = grid[0] * grid[1]
        ends = target.ends()
        draft = EagleConfig(TransformerConfig(size, 1, 2, 48), codes, 4, tokens)
        head = EagleHead(draft, ends["embedding"], ends["lm_head"], ends["rope"])
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=sharpness / math.sqrt(parameter.shape[1]), generator=generator)
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2 and name != "fc.weight":
                parameter.normal_(std=0.6 / math.sqrt(parameter.shape[1]), generator=generator)
            elif name == "fc.weight":
                parameter[:, :size].normal_(std=0.4 / math.sqrt(size), generator=generator)
    head.embedding, head.lm_head = target.embedding.weight.detach(), target.lm_head.weight.detach()
    return target.eval().requires_grad_(False), head.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def toy():
    """toy(codes=5, grid=(3, 3), ...) -> (LlamaGen, EagleHead) with seeded random weights; captions are words a b c.

    The head knows the target's hidden state and output matrix but not its layers: a mediocre draft, as wanted.
    The pair is shared between tests: use `toy_copy` to change it.
    """
    return _toy


@pytest.fixture(scope="session")
def toy_copy():
    return lambda **shape: copy.deepcopy(_toy(**shape))


@pytest.fixture(scope="session")
def saved_toy(tmp_path_factory):
    """Folder with a toy pair as target/ and draft/ and a random image tokenizer: 3 x 3 tokens, 12 pixels."""
    folder = tmp_path_factory.mktemp("checkpoints")
    target, head = copy.deepcopy(_toy())
    torch.manual_seed(0)
    LlamaGenVQ(LlamaGenVQConfig(12, 5, 8, True, 8, 8, (1, 1), 1, 2, 4)).save(folder / "tokenizer")
    target.save(folder / "target")
    head.config = dataclasses.replace(head.config, target=target.fingerprint)
    save_head(head, folder / "draft")
    return folder


@pytest.fixture
def say(record_property):
    """say(text): a line below the tests' results, whether they passed or not."""
    return lambda text: record_property(SAID, text)


def pytest_terminal_summary(terminalreporter):
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, text in getattr(report, "user_properties", []):
                if name == SAID and report.when == "call":
                    terminalreporter.write_line(f"{report.nodeid}: {text}")


@pytest.fixture
def rng():
    """A fresh generator with a fixed seed: chance is an argument."""
    return torch.Generator().manual_seed(20260112)


@pytest.fixture(scope="session")
def distributions():
    """distributions(generator, *shape) -> random probabilities [*shape], last axis normalised, none near zero."""

    def make(generator, *shape, sharpness=1.0):
        return (torch.randn(*shape, generator=generator) * sharpness).softmax(-1)

    return make


class _Liar:
    def __init__(self, chain, share):
        self.chain, self.share = chain, share

    def __getattr__(self, name):
        return getattr(self.chain, name)

    def propose(self, uniforms):
        tree = self.chain.propose(uniforms)
        wrong = tree.draft_probs.roll(1, -1)
        return dataclasses.replace(tree, draft_probs=torch.lerp(tree.draft_probs, wrong, self.share))


@pytest.fixture(scope="session")
def liar():
    """liar(chain, share): reports distributions of which this share is false, a negative control of losslessness."""
    return _Liar


@pytest.fixture(scope="session")
def p_value():
    """p_value(counts, law) of Pearson's chi-square; outcomes expected fewer than 5 times are pooled.

    counts [K] observed, law [K] probabilities. A true law gives a p-value uniform in [0, 1]: with the fixed seeds here
    a test asks for > 1e-3, and its negative control, a false law, must give < 1e-6.
    """

    def test(counts, law):
        counts, law = counts.double().flatten(), law.double().flatten()
        assert abs(float(law.sum()) - 1) < 1e-5
        expected = law / law.sum() * counts.sum()
        if bool((counts[expected == 0] > 0).any()):
            return 0.0
        order = expected.argsort()
        pooled = max(
            int((expected < 5).sum()), int((expected[order].cumsum(0) < 5).sum()) + 1
        )  # of at least 5 together
        rare, common = order[:pooled], order[pooled:]
        observed = torch.cat([counts[rare].sum()[None], counts[common]])
        wanted = torch.cat([expected[rare].sum()[None], expected[common]])
        statistic = float(((observed - wanted) ** 2 / wanted).sum())
        return float(stats.chi2.sf(statistic, len(observed) - 1))

    return test


def _from_official(weights):
    """LANTERN's drafter names -> ours. Its caption slots carry token 0, which is our prefix embedding."""
    layer, our = "layers.0", "transformer.layers.0"
    qkv = [weights[f"{layer}.self_attn.{name}_proj.weight"] for name in "qkv"]
    gate_up = [weights[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    return {
        "embedding": weights["embed_tokens.weight"],
        "prefix_embedding": weights["embed_tokens.weight"][0],
        "fc.weight": weights["fc.weight"],
        "fc.bias": weights["fc.bias"],
        f"{our}.attention.qkv.weight": torch.cat(qkv),
        f"{our}.attention.output.weight": weights[f"{layer}.self_attn.o_proj.weight"],
        f"{our}.feed_forward.gate_up.weight": torch.cat(gate_up),
        f"{our}.feed_forward.down.weight": weights[f"{layer}.mlp.down_proj.weight"],
        f"{our}.feed_forward_norm.weight": weights[f"{layer}.post_attention_layernorm.weight"],
    }


@pytest.fixture(scope="module")
def official_drafter():
    """LANTERN's: (head, inputs, outputs, json). Pair i stands at row i of the official table, at row i + 1 of ours."""
    facts = json.loads((PARITY / "lantern_drafter_llamagen_a.json").read_text())
    weights, given, out = (
        load_file(PARITY / f"lantern_drafter_llamagen_a_{part}.safetensors") for part in ("weights", "in", "out")
    )
    c = facts["config"]
    shape = TransformerConfig(
        c["hidden_size"], 1, c["num_attention_heads"], c["intermediate_size"], norm_eps=c["rms_norm_eps"]
    )
    config = EagleConfig(
        shape, c["vocab_size"], c["prefix"], c["block_size"], own_embedding=True, mask_prefix_pads=False
    )
    rope = torch.cat([torch.zeros(1, *out["rope_table"].shape[1:]), out["rope_table"]])
    head = EagleHead(config, weights["embed_tokens.weight"], given["head"], rope)
    head.load_state_dict(_from_official(weights))
    return head.eval().requires_grad_(False), given, out, facts


@pytest.fixture(scope="session")
def text_encoder(tmp_path_factory):
    """Folder of a random T5 with a word tokenizer, as transformers saves them."""
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel  # takes a second

    folder = tmp_path_factory.mktemp("t5")
    words = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", "a", "red", "apple", "cat"])}
    tokenizer = Tokenizer(WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    T5EncoderModel(T5Config(vocab_size=7, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3)).save_pretrained(
        folder
    )
    return folder
