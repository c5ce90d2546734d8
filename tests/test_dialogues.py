"""chat.py and masks against transformers, a loss written out and ranks; damage, bad dialogues."""

import ast
import functools
import json
import shutil

import numpy as np
import pytest
import ranks
import torch
import torch.nn.functional as F
from conftest import ROOT, flags, losses, train_here, write_shard
from test_fineweb import STDLIB, contents, prepare, refused, shard_tokens, stopped_after
from test_tokenizer import byte_level

import model as models
import train
from configurator import configure
from corpus import chat, packing, text_files, tokenizer
from corpus.chat import Dialogues
from corpus.loader import DataError, TokenLoader
from corpus.shards import mask_path, verify
from corpus.text_files import Document, Tally
from run import build
from scale import parallel
from settings import Config
from system.errors import UserError

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' }}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {%- generation %}{{- message.content | trim + '<|im_end|>' }}{%- endgeneration %}\n"
    "    {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}\n"
    "    {{- '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
PLAIN = CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
LLAMA3 = (  # the form of Llama 3's
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start|>' + m['role'] + '<|end|>\n\n' + m['content'] | trim + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)


@functools.cache
def questions():
    """Dialogues of one to three turns on functions of Python's modules, answered by docstrings."""
    found, turns = [], []
    for path in sorted(STDLIB.glob("[a-d]*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                turns += ["user", f"What does {path.stem}.{node.name} do?", "assistant", text[:120]]
                if len(turns) // 4 > len(found) % 3:
                    found.append(said(*turns))
                    turns = []
    return found[:240]


MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def save_tokenizer(folder, template, special=MARKS, **settings):
    folder.mkdir()
    texts = [message["content"] for messages in questions() for message in messages]
    byte_level(folder, texts, vocab_size=400, special=special)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": template, **settings}))
    return folder


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers") / "chatml"
    return save_tokenizer(folder, PLAIN, eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def data(tmp_path_factory, chatml):
    """(folder of shards of the dialogues, the file of the dialogues)."""
    root = tmp_path_factory.mktemp("chats")
    lines = [json.dumps({"messages": messages, "id": 1}) + "\n" for messages in questions()]
    (root / "chats.jsonl").write_text("".join(lines))
    settings = dict(text_key="messages", tokenizer=str(chatml), val_tokens=2000, shard_tokens=3001)
    assert "of them with loss" in prepare(root / "d", root / "chats.jsonl", **settings)
    return root / "d", root / "chats.jsonl"


def rows_of(folder, *values, tally=None):
    """The rows of dialogues, or of pairs if they are tuples."""
    dialogues = Dialogues(tokenizer.load(str(folder)), tally or Tally())
    return list(dialogues.rows(Document(f"a:{i}", value) for i, value in enumerate(values, 1)))


def with_template(folder, template, to):
    """A copy of a tokenizer's folder with another chat template."""
    shutil.copytree(folder, to)
    config = dict(chat_template=template, eos_token="<|endoftext|>")
    (to / "tokenizer_config.json").write_text(json.dumps(config))
    return to


def test_messages_of_other_forms_are_read_or_refused():
    """Parts of text, fields that parquet fills with None, a system prompt."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert chat.normalized(parts) == said("user", "hello")
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "get", "arguments": {}}}]}
    assert chat.normalized([call]) == [call]
    for content in (None, 42, [{"type": "image"}]):
        messages = [{"role": "user", "text": "a", "content": content}]
        refused(DataError, "content|text", chat.normalized, messages)
    record = {"messages": said("user", "a", "assistant", "b"), "system": "Be brief.", "tools": None}
    record["messages"][1]["extra"] = {"city": None}
    one = text_files.document("a:1", record, ("messages",), Tally())
    assert one.value[0] == {"role": "system", "content": "Be brief."} and one.tools is None
    assert one.value[2] == {"role": "assistant", "content": "b", "extra": {}}


def with_loss(folder, row):
    """The text of a row's tokens with loss, the parts of several answers apart."""
    tok = tokenizer.load(str(folder))
    edges = np.flatnonzero(np.diff(row["loss"].astype(int), prepend=0, append=0))
    return [tok.decode(row["token"][a:b]) for a, b in edges.reshape(-1, 2)]


def said(*turns, **more):
    """Messages of roles and contents that follow one another."""
    return [dict(role=r, content=c, **more) for r, c in zip(turns[::2], turns[1::2])]


def read_mask(folder, split):
    """(tokens, whether each carries loss) of a split."""
    tokens = np.concatenate(shard_tokens(folder, split))
    paths, masks = sorted(folder.glob(f"*_{split}_*.mask")), []
    for path, shard in zip(paths, shard_tokens(folder, split), strict=True):
        masks.append(np.unpackbits(np.fromfile(path, np.uint8), bitorder="little")[: len(shard)])
    return tokens, np.concatenate(masks).astype(bool)


# As Qwen3's: reasoning of earlier turns is dropped, so that no answer is found by rendering without
# it.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content if loop.last else m.content.split()[-1] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize("ours, reference", [(PLAIN, CHATML), (FORGETFUL, FORGETFUL)])
@pytest.mark.fault(114)
def test_tokens_and_masks_are_those_of_transformers(chatml, tmp_path, ours, reference):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(chatml)
    folder, some = with_template(chatml, ours, tmp_path / "t"), questions()[:80]
    for row, messages in zip(rows_of(folder, *some), some, strict=True):
        options = dict(chat_template=reference, return_dict=True, return_assistant_tokens_mask=True)
        expected = theirs.apply_chat_template(messages, **options)
        assert row["token"].tolist() == [0, *expected["input_ids"]]
        assert row["loss"].tolist() == [False, *map(bool, expected["assistant_masks"])]


# The end of a turn behind what is marked, after a line break, and as the next role's token.
NEXT_LINE = CHATML.replace("| trim + '<|im_end|>'", "| trim")
NEXT_LINE = NEXT_LINE.replace("endgeneration %}", "endgeneration %}{{- '\\n<|im_end|>' }}")
NO_END = (
    "{% for m in messages %}{{ '<|im_start|>' if m.role == 'assistant' else '<|im_end|>' }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
TALK = ("user", "a?", "assistant", "yes", "user", "b?", "assistant", "no")


@pytest.mark.parametrize("template, first, second", [
    (PLAIN, "yes<|im_end|>", "no<|im_end|>"),
    (NEXT_LINE, "yes\n<|im_end|>", "no\n<|im_end|>"),
    (NO_END, "yes<|im_end|>", "no"),
])  # fmt: skip
def test_the_end_of_a_turn_carries_loss_and_stops_a_reply(
    chatml, tmp_path, template, first, second
):
    folder = with_template(chatml, template, tmp_path / "t")
    (row,) = rows_of(folder, said(*TALK))
    assert with_loss(folder, row) == [first, second]
    tok = tokenizer.load(str(folder))
    assert chat.stop_ids(folder, tok) == {tok.eot, tok.special["<|im_end|>"]}


@pytest.mark.parametrize("template", [PLAIN, CHATML])
def test_answers_of_no_weight_have_no_loss(chatml, tmp_path, template):
    """As in OpenAI's files and axolotl's."""
    folder = with_template(chatml, template, tmp_path / "t")
    for key in ("weight", "train", "training"):
        messages = said(*TALK)
        messages[1][key] = 0
        messages[3][key] = True
        tally = Tally()
        rows = rows_of(folder, messages, [messages[1]], tally=tally)
        assert with_loss(folder, rows[0]) == ["no<|im_end|>"] and not len(rows[1])
        assert "1 dialogues without an answer" in str(tally)
        messages[1][key] = 0.5
        refused(DataError, f"a:1: {key}=0.5", rows_of, folder, messages)


def test_roles_of_other_files_and_those_that_vanish(chatml, tmp_path):
    """ShareGPT's names, Gemma's model; a dialogue without an answer is counted."""
    sharegpt = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "yes"}]
    lines = [sharegpt, said("user", "a?", "model", "yes"), said("User", "a?", "Assistant", "yes")]
    lines += [said("user", "a?", "narrator", "yes")]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"conversations": m}) + "\n" for m in lines))
    given = dict(text_key="conversations", tokenizer=str(chatml), val_tokens=0)
    shown = prepare(tmp_path / "d", file, **given)
    assert "1 dialogues without an answer" in shown and "--vocab_size" not in shown
    (expected,) = rows_of(chatml, said("user", "a?", "assistant", "yes"))
    tokens, loss = read_mask(tmp_path / "d", "train")
    assert tokens.tolist() == expected["token"].tolist() * 3
    assert loss.tolist() == expected["loss"].tolist() * 3


def test_a_template_that_begins_with_the_separator_gets_no_second_one(tmp_path):
    special = ("<|begin_of_text|>", "<|start|>", "<|end|>", "<|eot|>")
    marks = dict(bos_token={"content": special[0]}, eos_token="<|eot|>")
    folder = save_tokenizer(tmp_path / "llama", LLAMA3, special, **marks)
    tok = tokenizer.load(str(folder))
    talk = said("user", "a", "assistant", " yes ", x=None)
    (row,) = rows_of(folder, talk)
    assert tok.decode(row["token"]) == (
        "<|begin_of_text|><|start|>user<|end|>\n\na<|eot|><|start|>assistant<|end|>\n\nyes<|eot|>"
    )
    assert tok.decode(row["token"][row["loss"]]) == "yes<|eot|>"
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)  # it has precedence
    (row,) = rows_of(folder, ("a?", "yes"))  # a pair is a user's message and the answer
    assert tok.decode(row["token"]) == "<|begin_of_text|>a?yes"
    assert tok.decode(row["token"][row["loss"]]) == "yes"


def test_shards_and_loader_hold_every_dialogue_for_any_rank(data, chatml):
    folder, _ = data
    verify(folder)
    rows = rows_of(chatml, *questions())
    found = {split: read_mask(folder, split) for split in ("val", "train")}
    for k, name in enumerate(("token", "loss")):
        both = np.concatenate([found["val"][k], found["train"][k]])
        assert np.array_equal(both, np.concatenate([row[name] for row in rows]))
    tokens, loss = found["train"]
    T, n = 100, len(tokens)
    targets = np.where(loss, tokens.astype(int), -100)
    loaders = [TokenLoader(folder, "train", 2, T, rank, 2, vocab_size=400) for rank in range(2)]
    for k in range(2 * n // (4 * T)):  # two epochs, so that rows wrap around
        x, y = zip(*[loader.next() for loader in loaders])
        at = (np.arange(4 * k, 4 * k + 4)[:, None] % -(-n // T) * T + np.arange(T)) % n
        assert np.array_equal(torch.cat(x), tokens[at])
        assert np.array_equal(torch.cat(y), targets[(at + 1) % n])
    [loader.close() for loader in loaders]


def test_packing_keeps_masks_with_their_tokens_and_goes_on_after_a_stop(
    data, tmp_path, chatml, monkeypatch
):
    monkeypatch.setattr(packing, "DOCUMENTS", 40)  # a sixth of them
    _, file = data
    settings = dict(text_key="messages", tokenizer=str(chatml), val_tokens=2000)
    settings |= dict(shard_tokens=3001, pack=256)
    prepare(tmp_path / "d", file, **settings)
    for count in (2, 4):
        with stopped_after(count):
            prepare(tmp_path / "stopped", file, **settings)
    prepare(tmp_path / "stopped", file, **settings)
    assert (whole := contents(tmp_path / "stopped")) == contents(tmp_path / "d")
    assert whole["chats_val_000000.bin"] == contents(data[0])["chats_val_000000.bin"]
    # whole groups of 256 tokens
    assert {len(shard) for shard in shard_tokens(tmp_path / "d", "train")[:-1]} == {11 * 256}

    def documents(folder):
        tokens, loss = read_mask(folder, "train")
        pairs = [(int(t), bool(m)) for t, m in zip(tokens, loss)]
        at = [*np.flatnonzero(tokens == 0), len(tokens)]
        return sorted(pairs[a:b] for a, b in zip(at, at[1:]))

    assert documents(tmp_path / "d") == documents(data[0])
    for T, warnings in ((256, 0), (64, 1)):  # of another block_size
        loader = TokenLoader(tmp_path / "d", "train", 1, T)
        assert len(loader.warnings) == warnings
        loader.close()


SHAPE = dict(vocab_size=400, vocab_multiple=1, tokenizer=None, batch_tokens=512)
SHAPE |= dict(max_steps=4, eval_interval=4)


def masked_step(words):
    """A step without clipping: (the loss over all ranks, {parameter: its gradient}, the norm)."""
    cfg = configure(Config, words)
    world = parallel.join(cfg)
    loader = build.make_loader(cfg, world)
    job = train.Training(build.choose(cfg, world.device)[0], world, loader)
    sums = job.accumulate(loader.next)
    norm = job.normalize_and_clip(sums)
    loss = job.figures.means(job.figures.over_ranks(sums, norm, {}))[0]
    loader.close()
    grads = {}
    for name, p in job.state.model.named_parameters():
        whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        grads[name] = whole.clone()
    parallel.stop()
    return loss, grads, norm.item()


@pytest.mark.parametrize("parallel_as", ["ddp", "fsdp", "context"])
def test_the_gradients_are_those_of_the_mean_over_all_answers_of_the_step(
    data, tmp_path, parallel_as
):
    """Micro-steps and ranks differ in their numbers of answers; the mean of means is another."""
    folder, _ = data
    given = SHAPE | dict(batch_size=1, batch_tokens=256, clip=None, positions="rope")
    more = dict(context_parallel=2) if parallel_as == "context" else dict(parallel=parallel_as)
    test, *own = flags(folder, tmp_path / "run", **given)
    own = [str(ROOT / test), *own]
    cfg = configure(Config, own)
    tokens, loss = (
        torch.from_numpy(a[: 8 * 32 + 1].astype(int)) for a in read_mask(folder, "train")
    )
    model = models.build(cfg, torch.device("cpu"), cfg.seed)
    x, y = tokens[:-1].view(8, 32), torch.where(loss[1:] > 0, tokens[1:], -100).view(8, 32)
    assert len((y >= 0).sum(1).unique()) > 2
    expected = F.cross_entropy(model.logits(x).mT, y)
    expected.backward()
    refs = {name: p.grad for name, p in model.named_parameters()}
    whole_norm = torch.cat([g.flatten() for g in refs.values()]).norm().item()
    over_ranks = [*own, *(f"--{name}={value}" for name, value in more.items())]
    for found, grads, norm in [masked_step(own), *ranks.call(2, masked_step, over_ranks)]:
        assert found == pytest.approx(expected.item(), rel=2e-6)
        torch.testing.assert_close(grads, refs, rtol=1e-4, atol=1e-7)
        assert norm == pytest.approx(whole_norm, rel=1e-5)


def test_a_step_without_answers_has_no_loss(data, tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    tokens = np.concatenate(shard_tokens(data[0], "train"))[:2001]
    for name, loss in {"x_train_000001": np.arange(2001) > 200, "x_val_000000": [0] * 2001}.items():
        path = write_shard(folder / f"{name}.bin", tokens)
        mask_path(path).write_bytes(np.packbits(loss, bitorder="little").tobytes())
    settings = SHAPE | dict(eval_interval=0, batch_tokens=128)
    log = train_here(folder, tmp_path / "run", **settings)
    first = next(line for line in log if line["kind"] == "train")
    assert first["loss"] is None and first["norm"] == 0.0 and 3 < losses(log)[4] < 8
    settings["eval_interval"] = 4
    val = tmp_path / "val"
    refused(DataError, "no row of block_size=32 with loss", train_here, folder, val, **settings)


def test_damaged_masks(data, tmp_path):
    folder = tmp_path / "d"
    shutil.copytree(data[0], folder)
    mask = folder / "chats_train_000001.mask"
    good = mask.read_bytes()
    mask.write_bytes(bytes([good[0] ^ 4]) + good[1:])
    refused(DataError, "chats_train_000001.mask is damaged", verify, folder)
    for damage in (lambda: mask.write_bytes(good[:-1]), mask.unlink):
        damage()
        refused(DataError, "mask is damaged", TokenLoader, folder, "train", 1, 16)
    refused(DataError, "no file", verify, folder)


CHANGES = "{% for m in messages %}{{ m.content if loop.last else m.content | upper }}{% endfor %}"


@pytest.mark.parametrize("template, messages, word", [
    (None, said("user", "a", "assistant", "b"), "template"),
    ("{{ raise_exception('no') }}", said("user", "a", "assistant", "b"), "TemplateError"),
    (CHANGES, said("user", "a", "assistant", "b", "user", "c"), "message 2"),
    ([dict(name="default", template=PLAIN)], said("user", "a", "assistant", "b"), "fails"),
    (PLAIN, "not a list", "content"),
    (PLAIN, [dict(content="a")], "role"),
    (PLAIN, said("user", "a", "assistant", "b", train_detail=[]), "train_detail"),
])  # fmt: skip
def test_bad_dialogues_are_refused_in_one_line(chatml, tmp_path, template, messages, word):
    folder = with_template(chatml, template, tmp_path / "t")
    refused(UserError, word, rows_of, folder, messages)
