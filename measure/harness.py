"""lm-evaluation-harness for a checkpoint, an edited model's too: its own command, lm_eval run.

    python -m measure.harness --model_args=checkpoint=out/a --tasks=hellaswag,piqa
    python -m measure.harness --model_args=checkpoint=out/a,precision=fp32 \\
        --tasks=gsm8k --num_fewshot=5 --output_path=gsm8k.json
    torchrun --standalone --nproc_per_node=8 -m measure.harness \\
        --model_args=checkpoint=out/a --tasks=mmlu

Nothing is exported. Needs `pip install lm_eval==0.4.13`; --help lists the harness's options, and
settings.TrainedConfig what --model_args takes.

The harness cuts contexts and continuations into tokens as for its class for Hugging Face, whose
scores an exported model has. Each of N ranks is given all requests, scores a part of the batches
and returns all ranks' answers: the batches are those of one process.
"""

import os
import sys

import numpy as np
import torch
import torch.nn.functional as F

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    sys.exit(f"error: {error}; pip install lm_eval==0.4.13")

import hellaswag
from configurator import configure
from run import sampling, trained
from scale import parallel
from settings import TrainedConfig
from system import errors
from system.errors import UserError, is_rank_0, listed

BATCH_TOKENS = 4096  # in a forward that scores; they have 0.8 GB of logits in GPT-2's vocabulary
NEW_TOKENS = 256  # at most, of a text whose task does not say how many
KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_k"}  # generation settings


@register_model("checkpoint")
class LanguageModel(TemplateLM):
    """A model and its tokenizer, by a TrainedConfig, which answer requests."""

    def __init__(self, cfg):
        super().__init__()
        _, self.model, self.tokenizer, self.autocast = trained.load(cfg)
        self.limit = self.model.cfg.block_size

    @classmethod
    def create_from_arg_obj(cls, arg_dict, additional_config=None):
        """A model of the settings in --model_args; the harness's batch size is not used."""
        words = [f"--{key}={value}" for key, value in arg_dict.items()]
        return cls(configure(TrainedConfig, words))

    @property
    def eot_token_id(self):
        return self.tokenizer.eot

    def tok_encode(self, string, **_):
        return list(self.tokenizer.encode(string))

    def _loglikelihood_tokens(self, requests, **_):
        """[(log p of a continuation, whether each of its tokens is the likeliest)].

        requests: [(texts, ids of the context, ids of the continuation)].
        """
        rows = []
        starts = []
        for texts, context, more in requests:
            assert 1 <= len(more) <= self.limit, f"{texts}: {len(more)} tokens, {self.limit=}"
            row = np.array([*context, *more])[-(self.limit + 1) :]  # the left is cut off, as by hf
            rows.append(row)
            starts.append(len(row) - len(more))
        with self.autocast:
            sums = hellaswag.over_rows(self.measure, 2, self.model, rows, starts, BATCH_TOKENS)
        return [(-loss, wrong == 0) for loss, wrong in sums.tolist()]

    def measure(self, idx, targets):
        """(B, T) ids and targets -> (B, 2): loss in nats, count of targets not the likeliest."""
        logits = self.model.logits(idx)
        # the loss is 0 where a target is -100
        loss = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        wrong = (logits.argmax(-1) != targets) & (targets >= 0)
        return torch.stack((loss.sum(1), wrong.sum(1)), 1)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """[log p of a whole text].

        Each of its tokens comes after as many as fit, the first one after the separator.
        """
        parts = []
        owners = []
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.eot_token_id, self.limit, 1):
                parts.append((request.args, *make_disjoint_window(window)))
                owners.append(owner)
        scores = [logp for logp, _ in self._loglikelihood_tokens(parts)]
        return np.bincount(owners, scores, len(requests)).tolist()

    def generate_until(self, requests, disable_tqdm=False):
        """[the text that continues a context]: up to a string of `until`, an end, or max_gen_toks.

        Each rank computes all of them.
        """
        if parallel.units(self.model):
            raise UserError("parallel=fsdp: tasks that generate need a whole model a rank, ddp")
        with self.autocast:
            cache = sampling.make_cache(self.model, self.tokenizer.eot)
            return [self.continued(*r.args, seed, cache) for seed, r in enumerate(requests)]

    def continued(self, context, options, seed, cache):
        """The text that continues a context; options: a task's generation settings."""
        options = normalize_gen_kwargs(options, NEW_TOKENS)
        temperature = options.get("temperature", 0)
        known = KNOWN if temperature else {*KNOWN, "top_p"}
        if unknown := sorted(options.keys() - known):
            raise UserError(f"gen_kwargs: not known here: {listed(unknown)}")
        most = options["max_gen_toks"]
        assert 0 < most < self.limit, f"max_gen_toks={most}, {self.limit=}"
        ids = self.tok_encode(context)[most - self.limit :] or [self.tokenizer.eot]
        new = []
        text = ""
        stops = [stop for stop in options["until"] if stop]
        steps = most, temperature, options.get("top_k"), seed, cache
        for new_id in sampling.continued(self.model, self.tokenizer, ids, *steps):
            new.append(new_id)
            text = self.tokenizer.decode(new)
            if any(stop in text for stop in stops):
                break
        for stop in stops:
            text = text.partition(stop)[0]
        return text


def main(words):
    """Runs `lm_eval run` with the words of its command line; rank 0 alone prints and writes."""
    if not is_rank_0():
        sys.stdout = open(os.devnull, "w")
        words = [word for word in words if not word.startswith("--output_path=")]
    sys.argv[1:] = ["run", "--model=checkpoint", *words]
    cli_evaluate()
    parallel.stop()


if __name__ == "__main__":
    errors.start()
    errors.run(main, sys.argv[1:])
