"""sample.py's command line and chat, and how it loads weights; test_sampling.py tests tokens."""

import dataclasses
import io
import json

import pytest
import ranks
import torch
from compare import CPU, LLAMA, gpt2
from conftest import peak_bytes, save_model
from test_dialogues import said
from test_fineweb import refused
from test_tokenizer import byte_level

import sample
from corpus import chat, tokenizer
from model import build
from run import hf, trained
from scale import parallel, shards
from settings import GPTConfig
from system.errors import UserError

TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- if loop.index > 8 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
{%- endif %}
"""
TINY = dict(vocab_size=257, n_layer=1, n_head=2, n_embd=16, block_size=32)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_samples_of_two_ranks_are_printed_in_order_as_by_one(tmp_path, mode, capsys):
    """In a model that ends its text with one token in six; 40 tokens go beyond block_size."""
    cfg = GPTConfig(**TINY, tie_embeddings=False)
    model = build(cfg, CPU, seed=0)
    with torch.no_grad():
        for weight in (model.norm.weight, model.norm.bias, model.head.weight):
            weight.zero_()
        model.norm.bias[0], model.head.weight[256, 0] = 1, 4
    settings = dict(checkpoint=str(save_model(tmp_path / "run", model, cfg)), prompt="so")
    settings |= dict(tokenizer="bytes", device="cpu", n_samples=5, max_new_tokens=40)
    settings |= dict(temperature=1, top_k=None)
    words = [f"--{name}={value}" for name, value in settings.items()]
    both = ranks.run(2, [*words, f"--parallel={mode}"], "sample.py")
    assert both.returncode == 0 and both.outputs[1] == both.stderr == "", both.stderr
    sample.main(sample.Config(**settings))
    texts, last = both.outputs[0].rsplit("-" * 80, 1)
    expected, _ = capsys.readouterr().out.rsplit("-" * 80, 1)
    assert texts == expected and len(set(map(len, texts.split("-" * 80)))) > 2
    assert all(text.lstrip("\n").startswith("so") for text in texts.split("-" * 80))
    assert " tokens in " in last


@pytest.fixture
def chatty(tmp_path):
    """A small Llama's Hugging Face folder; transformers wrote its tokenizer and chat template."""
    transformers = pytest.importorskip("transformers")
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start|>", "<|eot_id|>", "<|eom_id|>"]
    path = str(byte_level(tmp_path, [TEMPLATE], special=special))
    own = dict(bos_token=special[0], eos_token="<|eot_id|>", chat_template=TEMPLATE)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=path, **own)
    cfg = GPTConfig(**TINY | LLAMA | dict(vocab_size=300, block_size=128, n_hidden=32))
    folder = hf.save_hf(cfg, build(cfg, CPU, seed=0).state_dict(), tmp_path / "hf")
    theirs.save_pretrained(folder)
    ends = dict(eos_token_id=[1, 4, True, None, "x"])
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return folder, theirs


def test_a_conversation_is_written_as_transformers_does(chatty):
    folder, theirs = chatty
    tok = tokenizer.load(str(folder))
    talk = said("user", "  hi <|eot_id|> dé ", "assistant", "yes", "user", "x")
    expected = theirs.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    assert chat.Template(folder, tok).ids(talk) == expected
    assert expected.count(3) == 4  # special tokens are parsed
    assert tok.encode("<|eot_id|>")[0] > 4  # and in other text they are not
    assert chat.stop_ids(folder, tok) == {1, 3, 4}
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(eos_token="of no id")))
    assert chat.stop_ids(folder, tok) == {1, 3, 4}  # by the template's end of turn
    (folder / "chat_template.jinja").unlink()
    assert chat.stop_ids(folder, tok) == {1, 4}


def test_chat_replies_to_a_prompt_or_to_each_line(chatty, capsys, monkeypatch):
    options = dict(chat=True, max_new_tokens=6, temperature=0, device="cpu")
    options["pretrained"] = str(chatty[0])
    asked, ids = [], chat.Template.ids
    noted = lambda self, talk: asked.append(list(talk)) or ids(self, talk)
    monkeypatch.setattr(chat.Template, "ids", noted)
    sample.main(sample.Config(prompt="hi", **options))
    first = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nthere\n"))
    sample.main(sample.Config(**options))
    assert capsys.readouterr().out.partition("\n")[2].startswith(first)
    talk = said("user", "hi", "assistant", first[:-1], "user", "there")
    assert len(first) > 3 and asked[-1] == talk


@pytest.mark.fault(83)
@pytest.mark.parametrize("template, words", [
    ("{{ raise_exception('no\nuser') }}", "its chat template fails: TemplateError: no user"),
    ("{% if %}", "its chat template fails"),
    ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ("{{ messages.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
    (None, "has no chat template"),
])  # fmt: skip
def test_a_folder_without_a_usable_template_is_one_line(chatty, template, words):
    folder, _ = chatty
    path = folder / "chat_template.jinja"
    path.unlink() if template is None else path.write_text(template)
    cfg = sample.Config(pretrained=str(folder), chat=True, prompt="hi", device="cpu")
    assert str(folder) in str(refused(UserError, words, sample.main, cfg))


def written(path, source_of, precision):
    """The settings of a model whose weights were written to `path`."""
    shape = dict(n_embd=128, n_hidden=256, n_layer=12, vocab_size=256, n_head=4, block_size=64)
    cfg = GPTConfig(**shape, tie_embeddings=False, **LLAMA)
    model = build(cfg, CPU, seed=0).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    if source_of == "checkpoint":
        save_model(path, model, cfg)
    else:
        hf.save_hf(cfg, model.state_dict(), path, "bfloat16")
    return sample.Config(**{source_of: str(path)}, device="cpu", parallel="fsdp")


def divided_in_rank(*cases):
    """For ranks.call: divided models beside the whole ones, in logits and in memory.

    Returns whether their logits are equal, and bytes: of its part, of the whole, the most that a
    load held, the most that a forward held.
    """
    found, world, ids = [], parallel.start("cpu"), torch.arange(48)[None]
    for settings, precision in cases:
        plain = dataclasses.replace(settings, parallel="ddp")
        whole, _ = trained.load_model(plain, world, precision)
        peak = peak_bytes(lambda cfg=settings, kind=precision: trained.load_model(cfg, world, kind))
        model, _ = trained.load_model(settings, world, precision)
        with torch.no_grad():
            gathered = peak_bytes(lambda model=model: model.logits(ids))
            equal = torch.equal(model.logits(ids), whole.logits(ids))
        parallel.free_gathered(model)
        own = sum(shards.local(p).nbytes for p in model.parameters())
        found.append((equal, own, sum(p.nbytes for p in whole.parameters()), peak, gathered))
    parallel.stop()
    return found


def test_two_ranks_hold_half_a_model_each_and_never_the_whole(tmp_path):
    kinds = ("checkpoint", "fp32"), ("pretrained", "bf16")
    cases = [(written(tmp_path / kind, kind, precision), precision) for kind, precision in kinds]
    for in_rank in ranks.call(2, divided_in_rank, *cases):
        for equal, own, size, peak, gathered in in_rank:
            assert equal and own == size / 2
            assert peak < 1.6 * size  # the half, and the mapped file, which the profiler counts
            assert gathered < 0.5 * size  # a few units at a time, each a twelfth


@pytest.mark.parametrize("settings, message", [
    (dict(top_k=0, n_samples=0), "n_samples=0.*top_k=0"),
    (dict(temperature=float("nan")), "temperature=nan"),
    gpt2(dict(tokenizer="gpt2"), "50,257"),
    (dict(checkpoint=None), "--checkpoint"),
    (dict(chat=True), "torchrun"),
])  # fmt: skip
def test_mistakes_are_one_line(tmp_path, settings, message, monkeypatch):
    cfg = GPTConfig(**TINY)
    run = str(save_model(tmp_path / "run", build(cfg, CPU, seed=0), cfg))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") * ("chat" in settings):
        monkeypatch.setenv(name, "2" if "WORLD" in name else "1")
    cfg = sample.Config(**dict(checkpoint=run, tokenizer="bytes") | settings)
    refused(UserError, message, sample.main, cfg)
