"""measure/harness.py: a checkpoint's scores and texts in lm-evaluation-harness are its export's.

They need the package lm_eval (docs/checkpoints.md), and one accelerate, of its extra hf.
"""

import functools
import json

import pytest
import torch
from conftest import save_model
from ranks import call
from test_hellaswag import made_up

import convert
import hellaswag
from corpus import tokenizer as tokenizers
from model import build
from run import sampling
from settings import GPTConfig

installed = pytest.importorskip("lm_eval", reason="needs lm_eval: docs/checkpoints.md")
import datasets  # noqa: E402
from lm_eval import tasks  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402

from measure import harness  # noqa: E402

harness.BATCH_TOKENS = 300  # several batches

SHAPE = dict(vocab_size=257, vocab_multiple=1, block_size=64, n_layer=2, n_head=4, n_embd=32)
LLAMA = dict(norm="rmsnorm", positions="rope", mlp="swiglu", bias=False, n_kv_head=2)
# no export
ONCE = LLAMA | dict(qk_norm=True, value_embeddings=1, attention_gate=True, tie_embeddings=False)
TEXTS = [example["ctx"] for example in made_up(12)]
PAIRS = [(text, f" {word}") for text in TEXTS[:6] for word in ("a dog", "hill while they")]
PAIRS += [("", "the dog"), ("the man  ", "walks"), ("x" * 100, "y" * 30), ("ab", "z" * 64)]


def asked(kind, arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)
    ]


def checkpoint_of(folder, **changes):
    """The folder of a checkpoint of random weights whose greedy texts do not repeat one token."""
    cfg = GPTConfig(**SHAPE | changes)
    model = build(cfg, torch.device("cpu"), seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    cfg.tokenizer = "bytes"
    return save_model(folder, model, cfg)


def language_model(folder, **options):
    options |= dict(checkpoint=str(folder), device="cpu", precision="fp32")
    return harness.LanguageModel(harness.TrainedConfig(**options))


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    return language_model(checkpoint_of(tmp_path_factory.mktemp("once"), **ONCE))


@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["gpt2", "llama"])
def test_equals_the_harness_on_the_export(changes, tmp_path):
    pytest.importorskip("accelerate", reason="needs lm_eval[hf]")
    from lm_eval.models.huggingface import HFLM

    folder, to = str(checkpoint_of(tmp_path / "run", **changes)), str(tmp_path / "hf")
    convert.main(convert.Config(checkpoint=folder, to_hf=to))
    ours = language_model(folder)
    theirs = HFLM(pretrained=to, dtype="float32", device="cpu", batch_size=1)
    a, b = (m.loglikelihood(asked("loglikelihood", PAIRS)) for m in (ours, theirs))
    assert [score for score, _ in a] == pytest.approx([score for score, _ in b], rel=1e-5)
    assert [greedy for _, greedy in a] == [greedy for _, greedy in b]
    long = [(" ".join(TEXTS[:n]),) for n in (1, 6)]
    a, b = (m.loglikelihood_rolling(asked("loglikelihood_rolling", long)) for m in (ours, theirs))
    assert a == pytest.approx(b, rel=1e-5) and len(long[1][0]) > 2 * 64
    wanted = []
    for options in (
        dict(until=["o", "\n\n"], max_gen_toks=20),
        dict(until=[], max_gen_toks=9, do_sample=False),
        dict(until=["q"], max_gen_toks=24, do_sample=True, temperature=0.7, top_k=1),
    ):
        # one is cut to the context
        wanted += [(text, options) for text in (*TEXTS[:3], "x" * 90)]
    a, b = (m.generate_until(asked("generate_until", wanted)) for m in (ours, theirs))
    assert a == b and len(set(a)) > 6


def test_the_likeliest_continuation_is_greedy(once):
    """A model's own greedy text is greedy, and one with another last token is not.

    The model has no Hugging Face class.
    """
    ids = torch.tensor([list(b"the man")])
    new = [i for (i,) in sampling.steps(once.model, ids, 4, 0)]
    text = once.tokenizer.decode(new)
    assert len(text) == 4, "choose another seed: some token is half a character"
    other = text[:-1] + ("b" if text[-1] == "a" else "a")
    pairs = asked("loglikelihood", [("the man", text), ("the man", other), ("a", text)])
    (score, greedy), (less, not_greedy), _ = once.loglikelihood(pairs)  # of other places in a batch
    assert greedy and not not_greedy and less < score < 0
    row = torch.tensor([list(b"the man" + text.encode())])
    logp = once.model.logits(row).log_softmax(-1)[0, 6:-1]
    assert score == pytest.approx(logp.max(-1).values.sum().item(), rel=1e-5)


def answers(folder):
    """In a rank: the scores, and texts that are sampled."""
    model = language_model(folder)
    given = dict(until=[], max_gen_toks=8, do_sample=True, temperature=1.0)
    texts = model.generate_until(asked("generate_until", [(x, given) for x in TEXTS[:3]]))
    return model.loglikelihood(asked("loglikelihood", PAIRS[:8])), texts


def test_two_ranks_answer_as_one(tmp_path):
    """Texts are drawn alike too: each has its own seed, whichever rank computes it."""
    folder = str(checkpoint_of(tmp_path, **ONCE))
    scores, expected = answers(folder)
    for found, texts in call(2, answers, folder):
        assert texts == expected
        for answer, score in zip(found, scores, strict=True):
            assert answer == pytest.approx(score, rel=1e-6)


TASK = """
task: made_up
dataset_path: json
dataset_kwargs: {data_files: {validation: FILE}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{ctx}}"
doc_to_choice: "{{endings}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def test_a_task_from_a_file(tmp_path, capsys, monkeypatch):
    """With a task of one's own, the command's table and report have the acc of hellaswag.py."""
    monkeypatch.setattr(
        tasks, "TaskManager", functools.partial(tasks.TaskManager, include_defaults=False)
    )
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    lines, task = tmp_path / "examples.jsonl", tmp_path / "made_up.yaml"
    lines.write_text("\n".join(map(json.dumps, made_up(20))))
    task.write_text(TASK.replace("FILE", str(lines)))
    folder = checkpoint_of(tmp_path / "run")
    words = [f"--include_path={tmp_path}", "--tasks=made_up", "--limit=15"]
    words += ["--model_args", f"checkpoint={folder},device=cpu,precision=fp32"]
    harness.main([*words, f"--output_path={tmp_path / 'out.json'}"])
    (report,) = tmp_path.glob("out*.json")
    found = json.loads(report.read_text())["results"]["made_up"]
    model = language_model(folder).model
    prepared = hellaswag.prepare(made_up(20)[:15], tokenizers.load("bytes"), 64)
    expected = hellaswag.score(model, prepared)
    assert found["acc,none"] == expected["acc"]
    assert "|made_up|" in capsys.readouterr().out.replace(" ", "")
