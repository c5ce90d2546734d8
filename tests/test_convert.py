"""convert.py, run/hf.py: logits equal transformers', both ways are exact, the rest is refused."""

import dataclasses
import functools
import json

import huggingface_hub
import pytest
import torch
import transformers
from conftest import ROOT, save_model
from safetensors.torch import load_file, save_file
from saved import CPU, trap
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen3Config

import convert
import model
from model import build
from run import hf
from run.checkpoint import model_of
from settings import GPTConfig
from system.errors import UserError

SCALING = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
SCALING["original_max_position_embeddings"] = 32  # of 64: all three ranges of wavelengths occur


def gpt2(**changes):
    shape = dict(vocab_size=301, n_positions=64, n_embd=48, n_layer=2, n_head=3)
    return made(GPT2Config(**{**shape, **dict(bos_token_id=0, eos_token_id=0), **changes}))


SHAPE = dict(vocab_size=301, max_position_embeddings=64, hidden_size=64, intermediate_size=88)
SHAPE |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5)


def llama(kind=LlamaConfig, **changes):
    return made(kind(**SHAPE | changes))


def made(config):
    return randomized(AutoModelForCausalLM.from_config(config))


def randomized(model):
    """Every parameter unlike its neutral value and the others; large enough for sharp attention."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.15 + (p.dim() == 1))
    return model.eval()


qwen3 = functools.partial(llama, Qwen3Config, head_dim=16)
mistral = functools.partial(llama, MistralConfig, sliding_window=None)
LLAMA31 = dict(rope_parameters=SCALING | dict(rope_theta=1e4), max_position_embeddings=512)
THETA = dict(rope_type="default", rope_theta=1e6)
MODELS = {
    "gpt2": (gpt2, {}),
    "gpt2_untied": (gpt2, dict(tie_word_embeddings=False, n_inner=80, layer_norm_epsilon=1e-3)),
    "llama_tied": (llama, dict(tie_word_embeddings=True, rms_norm_eps=1e-3)),
    "llama_biases": (llama, dict(attention_bias=True, mlp_bias=True, num_key_value_heads=None)),
    "llama31": (llama, LLAMA31),
    "qwen3_tied": (qwen3, dict(head_dim=32, tie_word_embeddings=True, rope_parameters=THETA)),
    "mistral": (mistral, dict(head_dim=24, num_key_value_heads=1)),
}
LLAMA = dict(norm="rmsnorm", positions="rope", mlp="swiglu", bias=False)


def load(name):
    """(GPT in float32, its ImportedConfig)"""
    opened = hf.open_hf(name)
    return model_of(opened, CPU), opened.shape


def ids_for(model, B=2):
    torch.manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (B, model.config.max_position_embeddings))


def saved(model, folder, **options):
    model.save_pretrained(folder, **options)
    return folder


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(action, *words):
    """The one line that `action` is refused with; every word must be in it."""
    with pytest.raises(UserError) as caught:
        action()
    line = str(caught.value)
    assert "\n" not in line and all(w in line for w in words), line
    return line


@torch.no_grad()
@pytest.mark.parametrize("make, changes", MODELS.values(), ids=MODELS)
def test_logits_and_loss_equal_transformers_and_the_way_back_is_bitwise(make, changes, tmp_path):
    theirs = make(**changes)
    ours, cfg = load(saved(theirs, tmp_path / "a"))
    x = ids_for(theirs)
    expected, got = theirs(x, labels=x), ours.logits(x)
    assert got.shape == expected.logits.shape and got.dtype == torch.float32
    # float32 throughout, but fused matrices and SDPA sum in another order: about 1e-6 of the
    # largest logit a sum, of which 3e-7 to 6e-7 is left. A wrong epsilon, theta or head order is
    # off by 1e-3 and more.
    assert (got - expected.logits).abs().max() <= 5e-6 * expected.logits.abs().max()
    assert abs(ours(x[:, :-1], x[:, 1:])[0] - expected.loss) <= 2e-6 * expected.loss
    for stored in hf.open_hf(tmp_path / "a").tensors.values():  # as a sharded run reads
        assert torch.equal(stored[3 : stored.shape[0] - 2], stored[...][3:-2])
    hf.save_hf(cfg, ours.state_dict(), tmp_path / "b")
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in "ab")
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert type(again).__name__ == hf.family_of(cfg).architecture and again.dtype == torch.float32
    assert torch.equal(expected.logits, again(x).logits)  # so the settings came back as well
    assert not load(tmp_path / "b")[1].differences(cfg)


@pytest.mark.parametrize("changes", [
    dict(tie_embeddings=False, n_hidden=100),
    dict(LLAMA, bias=True, n_kv_head=1, rope_theta=5e5, rope_factor=4.0, rope_original=16),
    dict(LLAMA, qk_norm=True, n_kv_head=1, n_hidden=100, head_dim=24),
    dict(LLAMA, embed_norm=True, tie_embeddings=False),
    dict(LLAMA, qk_norm=True, mlp="relu2", embed_norm=True, tie_embeddings=False),
])  # fmt: skip
def test_ours_in_transformers(changes, tmp_path):
    cfg = GPTConfig(vocab_size=300, block_size=64, n_layer=2, n_head=2, n_embd=32, **changes)
    ours = randomized(build(cfg, CPU, seed=0))
    hf.save_hf(cfg, ours.state_dict(), tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    # not every reader takes null
    assert written.get("num_key_value_heads", cfg.kv_heads) == cfg.kv_heads
    x = torch.tensor(list((ROOT / "README.md").read_bytes()[:128])).view(2, 64)
    assert theirs.get_input_embeddings().weight.shape == (300, 32)
    with torch.no_grad():
        expected = theirs(x).logits
        assert (ours.logits(x) - expected).abs().max() <= 5e-6 * expected.abs().max()  # as above
        if cfg.mlp == "relu2":
            refused(lambda: load(tmp_path / "hf"), "hidden_act=relu")
            return
        again, cfg_again = load(tmp_path / "hf")
        assert (again.logits(x) - expected).abs().max() <= 5e-6 * expected.abs().max()
    assert cfg.embed_norm or not cfg_again.differences(cfg)
    assert (again.wte.weight[300:] == 0).all() and again.wte.weight.shape == (384, 32)


def test_shards(tmp_path, monkeypatch):
    theirs = llama()
    whole, cfg = load(saved(theirs, tmp_path / "sharded", max_shard_size="60KB"))
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    small = functools.partial(huggingface_hub.save_torch_state_dict, max_shard_size="60KB")
    monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", small)
    hf.save_hf(cfg, whole.state_dict(), tmp_path / "ours")
    files = list((tmp_path / "ours").glob("model-*-of-*.safetensors"))
    assert len(files) > 2 and not (tmp_path / "ours" / "model.safetensors").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(p, q) for p, q in zip(theirs.parameters(), again.parameters()))
    files[0].unlink()
    refused(lambda: load(tmp_path / "ours"), files[0].name)


@pytest.mark.fault(112)
@pytest.mark.parametrize("make, embedding", [
    (gpt2, "transformer.wte.weight"), (llama, "model.embed_tokens.weight"),
])  # fmt: skip
def test_files_of_tied_models(make, embedding, tmp_path):
    """As on the hub: no prefix, masks among the weights, the head once more or alone."""
    expected, _ = load(saved(make(tie_word_embeddings=True), tmp_path))
    path, (prefix, _, short) = tmp_path / "model.safetensors", embedding.partition(".")
    tensors = {k.removeprefix(f"{prefix}."): v for k, v in load_file(path).items()}
    for i in range(2):
        tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
        tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        tensors[f"layers.{i}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors[hf.HEAD] = tensors[short].clone()
    alone = {name: tensor for name, tensor in tensors.items() if name != short}
    for form in (tensors, alone):
        save_file(form, path)
        got, cfg = load(tmp_path)
        assert cfg.tie_embeddings is True
        assert all(torch.equal(p, q) for p, q in zip(expected.parameters(), got.parameters()))
    edit_config(tmp_path, tie_word_embeddings=False)
    refused(lambda: load(tmp_path), embedding)
    edit_config(tmp_path, tie_word_embeddings=True)
    save_file(tensors | {hf.HEAD: 2 * tensors[hf.HEAD]}, path)
    refused(lambda: load(tmp_path), "head")


@pytest.mark.fault(113)
def test_weights_of_several_dtypes_are_loaded(tmp_path):
    """As after training with adapters: some matrices are float32 beside bf16."""
    path = saved(llama().bfloat16(), tmp_path) / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if any(word in name for word in ("q_proj", "v_proj", "up_proj", "norm", "embed")):
            tensors[name] = tensors[name].float() * (1 + 1e-3)  # which bf16 does not hold
    save_file(tensors, path, {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(x := ids_for(theirs)).logits
        got = load(tmp_path)[0].logits(x)
    assert (got - expected).abs().max() <= 5e-6 * expected.abs().max()


def test_rope_as_transformers_4_writes_it(tmp_path):
    _, cfg = load(saved(llama(**LLAMA31), tmp_path))
    assert (cfg.rope_theta, cfg.rope_factor, cfg.rope_original) == (1e4, 8.0, 32)
    edit_config(tmp_path, rope_parameters=None, rope_theta=1e4, rope_scaling=SCALING)
    assert load(tmp_path)[1] == cfg


@pytest.mark.parametrize("name, family", hf.FAMILIES.items())
def test_absent_keys_mean_what_they_mean_to_transformers(name, family):
    theirs = transformers.AutoConfig.for_model(name)
    values = theirs.to_dict()
    values |= values.get("rope_parameters") or {}
    for key, setting in family.keys.items():
        if setting in family.values:
            assert values[key] == family.values[setting], key
    for key, some in family.allowed.items():
        assert values.get(key, some[0]) == some[0] or key == "sliding_window", key


@pytest.mark.parametrize("make, changes, word", [
    (gpt2, dict(model_type="opt"), "model_type=opt"),
    (llama, dict(model_type="mistral", sliding_window=4096), "sliding_window=4096"),
    (gpt2, dict(activation_function="relu"), "activation_function=relu"),
    (gpt2, dict(n_head=5), "n_head=5"),
    (gpt2, dict(n_layer=3), "transformer.h.2"),
    (gpt2, dict(n_layer=1), "transformer.h.1"),
    (gpt2, dict(tie_word_embeddings=False), "lm_head.weight"),
    (llama, dict(head_dim=32), "proj.weight: (64, 64)"),
    (llama, dict(rope_parameters=dict(rope_type="yarn", factor=4.0)), "rope_type=yarn"),
    (llama, dict(rope_parameters=SCALING | dict(low_freq_factor=2.0)), "low_freq_factor=2.0"),
])  # fmt: skip
def test_unsupported_is_one_line(make, changes, word, tmp_path):
    edit_config(saved(make(), tmp_path), **changes)
    refused(lambda: load(tmp_path), word)


@pytest.mark.fault(39, 71)
def test_damaged_missing_and_strange_files(tmp_path, monkeypatch):
    """Pickles are never opened, and an index names files of its folder only."""
    refused(lambda: load(tmp_path), "config.json", "No such file")
    path = saved(gpt2(), tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    refused(lambda: load(tmp_path), "model.safetensors", "damaged")
    path.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(trap(tmp_path / "sprung"))
    refused(lambda: load(tmp_path), "pytorch_model.bin", "safetensors")
    assert not (tmp_path / "sprung").exists()
    (tmp_path.parent / "model.safetensors").write_bytes(whole)
    for place in ("../model.safetensors", "/model.safetensors", 3, None):
        index = {"weight_map": {"wte.weight": place}} if place else []
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        refused(lambda: load(tmp_path), "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": ')
    refused(lambda: load(tmp_path), "config.json", "cannot be read")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(lambda: load("no-such/model"), "no-such/model", "no such folder")


@pytest.mark.parametrize("changes, word", [
    (dict(qk_norm=True, n_kv_head=1), "a gpt2 has no n_kv_head=1, qk_norm=True"),
    (dict(n_kv_head=1, bias=False), "a gpt2 has no bias=False, n_kv_head=1"),
    (dict(LLAMA, embed_norm=True), "tied"),
    (dict(LLAMA, mlp="gelu"), "a llama has no mlp=gelu"),
    (dict(LLAMA, qk_norm=True, bias=True), "a qwen3 has no bias=True"),
    (dict(LLAMA, embedding_mix=1), "a llama has no embedding_mix=1"),
])  # fmt: skip
def test_what_no_class_computes_is_refused(changes, word, tmp_path):
    ours = tiny(**changes)
    refused(lambda: hf.save_hf(ours.cfg, ours.state_dict(), tmp_path / "hf"), word)
    assert not any(tmp_path.iterdir())


def tiny(**changes):
    shape = dict(vocab_size=50, block_size=8, n_layer=1, n_head=2, n_embd=16)
    return build(GPTConfig(**shape, **changes), CPU, seed=0)


def test_a_folder_in_use_is_left_alone_and_settings_go_together(tmp_path):
    (tmp_path / "file").touch()
    for settings, word in [(dict(out=str(tmp_path)), "empty"), (dict(out="y", check=True), "=T")]:
        config = convert.Config(checkpoint="x", **settings)
        refused(lambda config=config: convert.main(config), word)


def test_check_compares_an_export_with_transformers(tmp_path, monkeypatch, capsys):
    cfg = tiny().cfg
    cfg = dataclasses.replace(cfg, embed_norm=True, tie_embeddings=False, **LLAMA)
    save_model(tmp_path / "run", randomized(build(cfg, CPU, seed=0)), cfg)

    def export(name):
        words = dict(checkpoint=str(tmp_path / "run"), to_hf=str(tmp_path / name))
        convert.main(convert.Config(**words, dtype="bfloat16", check=True))

    export("same")
    assert "logits" in capsys.readouterr().out
    plain = model.SwiGLU.forward
    monkeypatch.setattr(model.SwiGLU, "forward", lambda self, x: 2 * plain(self, x))
    refused(lambda: export("other"), "differ")


def test_an_export_with_new_parameters_is_refused(tmp_path, monkeypatch):
    build_block = model.Block.__init__

    def with_gate(self, cfg, rope, layer):
        build_block(self, cfg, rope, layer)
        self.gate = torch.nn.Linear(cfg.n_embd, 1)

    with monkeypatch.context() as patch:
        patch.setattr(model.Block, "__init__", with_gate)
        gated = randomized(tiny())
        save_model(tmp_path / "run", gated, gated.cfg)
        export = convert.Config(checkpoint=str(tmp_path / "run"), to_hf=str(tmp_path / "hf"))
        refused(lambda: convert.main(export), "blocks.0.gate.weight")
    # the same checkpoint and the model.py of before: its weights must not be dropped silently
    refused(lambda: convert.main(export), "blocks.0.gate.bias")
    assert not (tmp_path / "hf").exists()
