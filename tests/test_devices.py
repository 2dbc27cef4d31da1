"""On a GPU decoding would mix no devices, and wait for the device once a round: laws that need no GPU.

A `Remote` tensor says that it lies on a GPU, while a tensor of the host does its work, so that all values are real.
Under `Distance` an operation on tensors of both places raises, and every wait of the host is noted: for a number or a
size that depends on values, or for a copy from one place to the other. Not seen: what kernels do inside, how fast they
are, and which of them CUDA lacks. PyTorch must have been built with CUDA, as Linux's wheels are.
"""

import copy
import functools
import itertools
import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

import coolsd
from coolsd.decode import autoregressive, generate
from coolsd.heads.eagle import EagleConfig, make_head
from coolsd.image_tokenizers import LlamaGenVQ, LlamaGenVQConfig
from coolsd.image_tokenizers.vqgan import VQGAN, VQGANConfig
from coolsd.sampling import Sampling
from coolsd.targets.chameleon import Chameleon, ChameleonConfig
from coolsd.transformer import TransformerConfig

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this PyTorch was built without CUDA")
OURS = tuple(str(Path(__file__).parents[1] / part) for part in ("coolsd", "data", "training", "tests"))
GPU = torch.device("cuda", 0)
CAPTIONS = ["a b", "a b c a"]
MASKED = ("index", "index_put_")  # their indices may be masks


class Remote(Tensor):
    """`held` does its work."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        with torch.inference_mode(False):  # else no view of it could be taken
            remote = Tensor._make_wrapper_subclass(
                cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=GPU
            )
        remote.held = held
        return remote

    @classmethod
    def __torch_dispatch__(cls, operation, types, arguments=(), options=None):
        raise AssertionError("a Remote tensor lives under a Distance only")

    def __repr__(self):
        return f"Remote{list(self.shape)}"

    def tolist(self):  # torch refuses it for a class that is not its own
        return self.cpu().tolist()


def mapped(change, value):
    """The value with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)([mapped(change, part) for part in value]) if isinstance(value, list | tuple) else value


class Distance(FakeTensorMode):
    """Tensors may claim a GPU where there is none, as in its parent; what operations do to them is our own."""

    avoid_device_init = True
    composite = functools.cache(OpOverload._can_decompose)

    def __init__(self):
        super().__init__()
        self.waits = []  # the line of this repository that each was for

    def wait(self, *_):
        stack = [frame for frame in traceback.extract_stack() if frame.filename.startswith(OURS)]
        frame = next(frame for frame in reversed(stack) if frame.name not in ("wait", "tolist", "__torch_dispatch__"))
        self.waits.append(f"{Path(frame.filename).name}: {frame.line}")

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        options, name = options or {}, operation.overloadpacket.__name__
        if Distance.composite(operation):
            with self:  # what it is made of is seen, too
                return operation.decompose(*arguments, **options)
        if name == "_fused_sdp_choice":
            return 0  # attention by matrix products
        remote, host = {}, []

        def held(tensor):
            if isinstance(tensor, Remote):
                remote[id(tensor.held)] = tensor
                return tensor.held
            host.append(tensor)
            return tensor

        inputs, settings = mapped(held, arguments), {key: mapped(held, value) for key, value in options.items()}
        mixed = bool(remote) and bool(host)
        if mixed and name != "copy_":
            raise RuntimeError(f"{name} mixes devices")
        there = isinstance(arguments[0], Remote) if mixed else bool(remote)  # where the result lies
        if settings.get("device") is not None:
            there, settings["device"] = torch.device(settings["device"]).type == GPU.type, "cpu"
        result = operation(*inputs, **settings)
        sized = torch.Tag.dynamic_output_shape in operation.tags
        if name in MASKED:
            sized = any(index is not None and index.dtype == torch.bool for index in arguments[1])
        moved = mixed or (name == "_to_copy" and there != bool(remote))
        if moved or (remote and (sized or isinstance(result, bool | int | float))):
            self.wait()
        if not there:
            return result
        return mapped(lambda tensor: remote[id(tensor)] if id(tensor) in remote else Remote(tensor), result)


@pytest.fixture
def distance(monkeypatch):
    """A mode to enter. On CUDA `decode.Clock` reads the device's own clock: here is none."""
    found = Distance()
    monkeypatch.setattr(torch.cuda, "Event", Mock(**{"return_value.elapsed_time.return_value": 1.0}))
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    monkeypatch.setattr(torch.cuda, "synchronize", found.wait)
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # by its data alone no parameter becomes a Remote
    yield found
    torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.fixture(scope="module")
def families(toy_copy):
    """Name -> a target with an image tokenizer, and a head that reads all that one of its heads can read."""
    llamagen, _ = toy_copy(grid=(2, 2), size=16, layers=1)
    torch.manual_seed(0)
    object.__setattr__(llamagen, "image_tokenizer", LlamaGenVQ(LlamaGenVQConfig(8, 5, 8, True, 8, 8, (1, 1), 1, 2, 4)))
    shape = TransformerConfig(16, 2, 2, 24, qk_norm=True)
    config = ChameleonConfig(shape, "lumina", (32, 32), 5, 5 + 700, prompt_slots=22)
    words = SimpleNamespace(encode=lambda text, **_: SimpleNamespace(ids=[9] * len(text.split())))
    lumina = Chameleon(config, words, VQGAN(VQGANConfig(5, 3, 8, 32, (1,), 1)))
    found = {}
    for name, target, more in (
        ("llamagen", llamagen, {"context": True}),
        ("lumina", lumina, {"layers": (1, 2), "text": 5 + 700, "pairing": "same", "own_embedding": True}),
    ):
        shape, slots = TransformerConfig(16, 1, 2, 24), target.config.prompt_slots
        head = make_head(EagleConfig(shape, target.codebook_size, slots, target.image_tokens, **more), target.ends())
        target.layers = head.config.layers
        found[name] = target.eval().requires_grad_(False), head.eval().requires_grad_(False)
    return found


def astray(value):
    """Tensors of the host among all that a value is made of."""
    if isinstance(value, Tensor):
        return [] if isinstance(value, Remote) else [value]
    if not isinstance(value, list | tuple | dict):
        value = getattr(value, "__dict__", {}) if type(value).__module__.startswith(("coolsd", "torch.nn")) else {}
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in astray(part)]


DRAFTERS = {
    "plain": None,
    "chain": lambda head: coolsd.Chain(head, 3),
    "static tree": lambda head: coolsd.StaticTree(head, [(0,), (1,), (0, 0), (0, 1), (1, 0)]),
    "dynamic tree": lambda head: coolsd.DynamicTree(head, 6, 2, 2),
    "jacobi": lambda head: coolsd.Jacobi(4, "repeat"),
    "gumbel": lambda head: coolsd.Jacobi(4, "sample", coupling="gumbel"),
    "maximal": lambda head: coolsd.Jacobi(4, coupling="maximal"),
}
RULES = {
    "a multiple": (coolsd.CoolSD(1.5), Sampling(guidance=2.0), True),
    "neighbours": (coolsd.Lantern(2, 0.5, "own"), Sampling(temperature=0.8, top_k=3), False),
    "clusters": (coolsd.Grouped(2), Sampling(top_p=0.9, guidance=1.5), True),
    "one's own": (SimpleNamespace(accept_probs=lambda p, q, depth: p / q / depth), Sampling(guidance=3.0), False),
}
CASES = [("llamagen", "plain", "a multiple"), ("lumina", "plain", "neighbours")]  # without a rule, with its sampling
CASES += itertools.product(["llamagen"], list(DRAFTERS)[1:], RULES)
CASES += zip(itertools.repeat("lumina"), list(DRAFTERS)[1:], itertools.cycle(RULES))  # no rule knows a target
ROUND = "round"
LOOP = "decode.py: slowest, longest = "  # what the host has to know of a round


@pytest.mark.parametrize(("family", "drafter", "rule"), CASES)
def test_decoding_stays_on_the_device_and_waits_once_a_round(families, distance, monkeypatch, family, drafter, rule):
    monkeypatch.setattr("coolsd.decode.BLOCK", 2)  # new uniforms every other round, too
    (target, head), make, (rule, sampling, certificates) = families[family], DRAFTERS[drafter], RULES[rule]
    options = {"seed": 3, "sampling": sampling, "certificates": certificates}
    wanted = generate(target, CAPTIONS, make and make(head), make and rule, **options)
    rounds = []

    def observer(seen):
        rounds.append(seen)
        distance.waits.append(ROUND)

    with distance:
        target, head = copy.deepcopy(target).to(GPU), copy.deepcopy(head).to(GPU)
        mine = make and make(head)
        found = generate(target, CAPTIONS, mine, make and rule, observer=observer, **options)
        *waits, check, last = distance.waits[distance.waits.index(ROUND) :]
        assert torch.equal(found.tokens.cpu(), wanted.tokens) and torch.equal(found.images.cpu(), wanted.images)
        assert not astray([target, mine, found, rounds])
    assert len(rounds) > 1 and [wait[: len(LOOP)] for wait in waits] == [ROUND, LOOP] * len(rounds)
    assert check.startswith("decode.py: if bool(ledger.nll.isnan()")
    assert last.startswith("decode.py: torch.cuda.synchronize")


CARELESS = {  # each of them makes the host wait, once
    "a number": lambda probs: probs.max().item(),
    "a decision": lambda probs: bool((probs > 0).all()),
    "a list": lambda probs: probs.tolist(),
    "a mask": lambda probs: probs[probs > 0.5],
    "places": lambda probs: (probs > 0.5).nonzero(),
    "a copy to the host": lambda probs: probs.cpu(),
    "a copy to the device": lambda probs: torch.tensor([0.5], device=probs.device),
    "a copy into a tensor": lambda probs: probs.clone().copy_(torch.zeros(probs.shape)),
}


@pytest.mark.parametrize("deed", CARELESS)
def test_a_careless_wait_is_noticed(families, distance, deed):
    with distance:
        target = copy.deepcopy(families["llamagen"][0]).to(GPU)
        result = generate(target, CAPTIONS, observer=lambda seen: CARELESS[deed](seen.target_probs))
    ours = [wait for wait in distance.waits if wait.startswith("test_devices.py")]
    assert len(ours) == result.emitted.shape[1] == sum(wait.startswith(LOOP) for wait in distance.waits)


MIXING = {
    "a sum": lambda probs: probs + torch.zeros(probs.shape[-1]),
    "a gather": lambda probs: probs.gather(-1, torch.zeros(2, 1, 1, dtype=torch.long)),
    "an index": lambda probs: probs[torch.arange(2)],
    "a row": lambda probs: torch.cat([probs, torch.zeros(probs.shape)]),
}


@pytest.mark.parametrize("deed", MIXING)
def test_a_mix_of_devices_is_refused(families, distance, deed):
    with distance:
        target = copy.deepcopy(families["llamagen"][0]).to(GPU)
        with pytest.raises(RuntimeError, match="mixes devices"):
            generate(target, CAPTIONS, observer=lambda seen: MIXING[deed](seen.target_probs))


def test_a_tensor_left_on_the_host_is_found(families, distance):
    with distance:
        target, head = (model.to(GPU) for model in copy.deepcopy(families["llamagen"]))
        drafter = coolsd.Chain(head, 3)
        generate(target, CAPTIONS, drafter, coolsd.Vanilla(), decode_images=False)
        assert not astray([target, drafter])
        drafter.cache.length = drafter.cache.length.cpu()
        target.rope = target.rope.cpu()
        assert len(astray([target, drafter])) == 2


def test_what_is_loaded_for_the_device_works_there(saved_toy, distance, monkeypatch):
    made = []
    for place in ("cpu", "cuda"):
        with distance:
            if place == "cuda":
                monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
                monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
            target = coolsd.load_target(saved_toy / "target", place, "float32")
            head = coolsd.load_head(saved_toy / "draft", target)
            assert not astray([target, head]) or place == "cpu"
            result = generate(target, CAPTIONS, coolsd.Chain(head, 3), coolsd.Vanilla())
            again = target.encode_images(result.images.cpu())
            assert again.device == target.device == result.tokens.device
            slow = autoregressive(target, CAPTIONS)
            made.append([tensor.cpu() for tensor in (result.tokens, result.images, again, slow)])
    assert all(torch.equal(here, there) for here, there in zip(*made, strict=True))


@pytest.mark.parametrize("family", ["llamagen", "lumina"])
def test_a_training_step_waits_once(families, distance, family):
    """Up to its loss: PyTorch leaves the way back to threads of a real device."""
    from training.draft import DraftTraining  # takes seconds

    losses = []
    for place in ("cpu", "cuda"):
        with distance:
            target, head = (model.to(place) for model in copy.deepcopy(families[family]))
            prompt = target.encode(CAPTIONS, True)
            tokens = torch.arange(target.image_tokens, device=place).expand(2, 2, -1) % 5
            output = target.forced(prompt, tokens[:, 0])
            batch = {
                "hidden": output.hidden_states,
                "token_ids": torch.cat([torch.full(prompt.mask.shape, -1, device=place), tokens], -1),
                "valid": torch.cat([prompt.mask, tokens >= 0], -1),
                "index": torch.arange(2, device=place),
            }
            if output.layers:
                batch["layers"] = torch.cat(list(output.layers.values()), -1)
            if "context" in prompt.inputs:
                batch["context"] = prompt.inputs["context"]
            weights = {"acceptance_weight": 1.0, "guided_weight": 0.5}
            module = DraftTraining(guidance=2.0, rollout=2, relaxation=coolsd.CoolSD(), **weights)
            module.head, module.log = head.requires_grad_(True).train(), Mock()
            distance.waits.clear()
            loss = module.training_step(batch, 0)
            waits = distance.waits.copy()
            losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(waits) == 1 and waits[0].startswith("draft.py: if not torch.isfinite(loss)")
