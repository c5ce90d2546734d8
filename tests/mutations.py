"""Fifty-two faults put into the code on purpose, one at a time: which of them do the tests find?

    python tests/mutations.py              # all, each in a copy of the tree; half an hour
    python tests/mutations.py 3 17         # some, by number
    python tests/mutations.py --list       # numbers and reasons, without running a test

Prints a line for each: found, with the first test that turned red; NOT FOUND; NO TEST, where its
tests have another name by now, or need a package that is not installed; MOVED, where its anchor is
no more in the file once. Exits with the number of those that are not found. Not part of --all.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutation(NamedTuple):
    file: str
    old: str  # stands once in the file
    new: str
    why: str
    tests: str  # further words of pytest


MUTATIONS = [
    Mutation("train.py", "loss * (count / self", "loss * ((count + 1) / self",
             "a factor in a micro-step's share of the loss", "test_dialogues.py -k gradients"),
    Mutation("train.py", "parallel.sum_over_ranks(totals[1].clone())", "totals[1].clone()",
             "an all-reduce of the targets left out", "test_dialogues.py -k gradients"),
    Mutation("train.py", "x.numel() * self.world.size //", "x.numel() //",
             "tokens of one rank counted alone", "test_schedule.py -k boundary"),
    Mutation("train.py", "generators.seed(cfg.seed + world.rank)  # dropout differs by rank",
             "generators.seed(cfg.seed)", "a rank's seed: all ranks drop out alike",
             "test_parallel.py -k own_numbers"),
    Mutation("train.py", "may_skip and not parallel.all_finite", "may_skip and parallel.all_finite",
             "a step that is not finite is taken", "test_train.py -k skipped_bitwise"),
    Mutation("optim.py", "peak * (step + 1) / cfg.warmup_steps", "peak * step / cfg.warmup_steps",
             "the rate of the step before", "test_optim.py -k schedules"),
    Mutation("optim.py", "dist.all_reduce(square,", "dict(unused=square,",
             "the norm of sharded gradients over ranks", "test_parallel.py -k any_mode"),
    Mutation("optim.py", "(limit / (norm + 1e-6)).clamp(max=1)", "(limit / (norm + 1e-6))",
             "small gradients are scaled up", "test_parallel.py -k clipped"),
    Mutation("optim.py", 'group["lr"] = group.get("factor", 1.0) * lr', 'group["lr"] = lr',
             "groups lose their own rates", "test_optim.py"),
    Mutation("optim.py", "momentum = 0.85 + 0.1 * warm", "momentum = 0.95 + 0 * warm",
             "Muon's momentum does not warm up", "test_optim.py -k naive"),
    Mutation("optim.py", "torch.where(u * w > 0, w, 0)", "w",
             "Muon decays what its update lets grow", "test_optim.py -k naive"),
    Mutation("optim.py", "share = state.tokens / cfg.max_tokens",
             "share = state.step / cfg.max_steps", "a run in tokens ends by steps",
             "test_schedule.py"),
    Mutation("corpus/loader.py", "own = row + self.rank * self.B", "own = row",
             "every rank reads the first rank's rows", "test_loader.py -k global_batch"),
    Mutation("corpus/loader.py", "y[i] = ids[1:]", "y[i] = ids[:-1]",
             "targets are the inputs", "test_loader.py -k global_batch"),
    Mutation("corpus/loader.py", "y[max(0, rows - own) :] = -100",
             "y[max(0, rows - own) + 1 :] = -100",
             "a row that fills up a validation batch counts", "test_loader.py -k validation"),
    Mutation("corpus/loader.py", "y[i, ~has_loss[1:]] = -100", "y[i, ~has_loss[:-1]] = -100",
             "a loss mask off by one", "test_dialogues.py -k for_any_rank"),
    Mutation("corpus/loader.py", "periods * rows.weight + rows_before", "periods + rows_before",
             "a row of a mixture is read twice", "test_mixture.py -k one_order"),
    Mutation("corpus/mixture.py", "min(deadlines, key=deadlines.get)",
             "max(deadlines, key=deadlines.get)", "shares of a mixture drift",
             "test_mixture.py -k prefix"),
    Mutation("corpus/chat.py", "found.append((len(before), len(after)))",
             "found.append((0, len(after)))", "questions carry loss", "test_dialogues.py"),
    Mutation("corpus/writer.py", "document=number + 1, tokens=0", "document=number, tokens=0",
             "the last document of the validation is trained on", "test_fineweb.py -k disk_full"),
    Mutation("kernels.py", "is_causal=True", "is_causal=False", "tokens see later ones",
             "test_convert.py -k logits"),
    Mutation("kernels.py", "torch.cat((-second, first), dim=-1)",
             "torch.cat((second, first), dim=-1)", "RoPE turns the wrong way",
             "test_convert.py -k logits"),
    Mutation("kernels.py", "logits.device) < vocab_size", "logits.device) <= vocab_size",
             "a padding row takes part in the softmax", "test_model.py test_kernels.py"),
    Mutation("model.py", "2 * torch.sigmoid", "torch.sigmoid", "gates start at a half",
             "test_model.py test_sampling.py"),
    Mutation("model.py", "((turns - 1) / (4 - 1)).clamp(0, 1)", "((turns - 1) / 4).clamp(0, 1)",
             "Llama 3.1's frequencies", "test_convert.py -k logits"),
    Mutation("scale/ddp.py", 'if not dist.is_initialized() or cfg.parallel != "ddp"',
             'if dist.is_initialized() or cfg.parallel != "ddp"', "DDP left out",
             "test_parallel.py -k any_mode"),
    Mutation("scale/context_parallel.py", "unflatten(0, (N, -1))[rank]", "unflatten(0, (N, -1))[0]",
             "positions of the second half of a row", "test_parallel.py -k any_mode"),
    Mutation("scale/documents.py", "begins[:, 0] = True", "begins[:, 0] |= begins[:, 1]",
             "a document goes on in the next row", "test_documents.py"),
    Mutation("scale/activation_checkpointing.py", "generators.restore(ctx.states, x.device)",
             "pass",
             "dropout differs in the recomputation", "test_activation_checkpointing.py"),
    Mutation("scale/adamw8bit.py", 'weight_decay=group["weight_decay"],', "weight_decay=0.0,",
             "small tensors do not decay", "test_adamw8bit.py -k small_tensors"),
    Mutation("fast/loss.py", "added=dw if start else None", "added=None",
             "the head's gradient of the last chunk alone", "test_fast.py -k cross_entropy"),
    Mutation("fast/norm.py", "dweight, dshift, _ = sums.unbind()",
             "dshift, dweight, _ = sums.unbind()", "a norm's weight and shift change places",
             "test_fast.py"),
    Mutation("fast/rope.py", "second *= w2[None, :]", "second *= w1[None, :]",
             "half of the weight of q's norm", "test_fast.py"),
    Mutation("run/pack.py", "(key, key): state for key",
             '(key, key): {k: v for k, v in state.items() if k != "exp_avg"} for key',
             "a moment is not saved", "test_train.py -k uninterrupted"),
    Mutation("run/pack.py", 'state.loader.load_state_dict(trees["loader"])', "pass",
             "a resumed run reads its rows again", "test_train.py -k uninterrupted"),
    Mutation("run/pack.py",
             'generators.restore(trees["rank"]["generators"], parallel.device_of(state.model))',
             "pass", "a resumed run draws other numbers", "test_train.py -k uninterrupted"),
    Mutation("run/pack.py", '"amaxes": magnitudes(state.model),', '"amaxes": [],',
             "fp8 resumes with scales from zero", "test_fp8.py -k scales_go_on"),
    Mutation("run/checkpoint.py", "if list(digest) != manifest[name]:",
             "if list(digest)[0] != manifest[name][0]:", "a flipped bit is not seen",
             "test_checkpoint.py -k damaged_newest"),
    Mutation("run/checkpoint.py", 'if step_of(folder) != self.best.get("step"):', "if True:",
             "the best checkpoint is removed", "test_checkpoint.py -k best"),
    Mutation("run/prove.py", "everywhere(self.compare_resumed)", "pass",
             "no resume is proved", "test_prove.py"),
    Mutation("run/prove.py", "everywhere(self.compare_tokens)", "pass",
             "masks and later tokens are not proved", "test_prove.py"),
    Mutation("run/prove.py", "if error > limit:", "if error > 100 * limit:",
             "the proof lets gradients pass that are one percent off", "test_prove.py"),
    Mutation("run/pack.py", "p.add_(torch.randn_like(p), alpha=scale)", "pass",
             "the proof's weights stay zero where they begin so", "test_prove.py"),
    Mutation("run/prove.py", "x[:, separators(T)] = eot", "pass",
             "the proof's rows have no separators", "test_prove.py"),
    Mutation("scale/context_parallel.py", "return max(apart) >", "return max(apart) > 1e9 *",
             "tokens may mix over more than a trial's rows", "test_prove.py -k far"),
    Mutation("run/pack.py", "buffer.fill_(10**6)", "pass",
             "a trial sees no late counters", "test_sampling.py -k edited"),
    Mutation("train.py", "optim.fill_gradients(self.state.model, self.analysis.unused)", "pass",
             "an expert without tokens moves under FSDP2 alone", "test_experiments.py -k experts"),
    Mutation("run/evaluate.py", "deviations = amounts - mean * units",
             "deviations = amounts - amounts.mean()", "a standard error for rows of one length",
             "test_validate.py -k scatter"),
    Mutation("run/figures.py", "parallel.sum_over_ranks(torch.stack(figures))",
             "torch.stack(figures) * self.ranks", "the loss of rank 0 is logged",
             "test_parallel.py -k any_mode"),
    Mutation("run/sampling.py", "F.pad(k.to(v.dtype), (0, MARKS))",
             "F.pad(k.to(v.dtype), (0, MARKS), value=NO_KEY)", "a cache hides what it holds",
             "test_sampling.py"),
    Mutation("run/hf.py", "n_kv_head=cfg.kv_heads, n_hidden", "n_kv_head=cfg.n_head, n_hidden",
             "an export says that all heads have keys", "test_convert.py -k ours_in"),
    Mutation("hellaswag.py", "targets[b, start - 1 : len(row) - 1] = row[start:]",
             "targets[b, start : len(row) - 1] = row[start + 1 :]",
             "the first token of an ending is not scored", "test_hellaswag.py -k one_row"),
    Mutation("measure/harness.py", " & (targets >= 0)", "",
             "tokens before a continuation count as wrong", "test_harness.py -k greedy"),
]  # fmt: skip


def applied(mutation):
    """The mutated text of its file; None where its anchor has moved."""
    text = (ROOT / mutation.file).read_text()
    return text.replace(mutation.old, mutation.new) if text.count(mutation.old) == 1 else None


def outcome(mutation):
    """How its tests end in a copy of the tree with the mutation."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "copy")
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(lambda name: (ROOT / name).is_file(), names.splitlines()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
        (folder / mutation.file).write_text(applied(mutation))
        words = [f"tests/{w}" if w.endswith(".py") else w for w in mutation.tests.split()]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "not slow"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        options = dict(cwd=folder, env=env, capture_output=True, text=True)
        done = subprocess.run([*command, *words], **options)
        assert done.returncode in (0, 1, 4, 5), done.stdout[-2000:]
        if done.returncode != 1:
            return "NO TEST" if done.returncode in (4, 5) else "NOT FOUND"
        return "found by " + re.search(r"^(?:FAILED|ERROR) (.*)", done.stdout, re.M)[1]


def main(words):
    chosen = [int(word) for word in words if word.isdigit()] or range(1, len(MUTATIONS) + 1)
    left = 0
    for number in chosen:
        mutation = MUTATIONS[number - 1]
        if applied(mutation) is None:
            end = f"MOVED: this is not once in the file: {mutation.old!r}"
        elif "--list" in words:
            end = ""
        else:
            end = outcome(mutation)
        left += not (end.startswith("found") or "--list" in words and not end)
        print(f"{number:2} {mutation.file}: {mutation.why}. {end}", flush=True)
    return left


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
