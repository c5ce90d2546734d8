"""A model of this repository as lm-evaluation-harness asks one; needs the package lm_eval.

    lm_eval.simple_evaluate(LanguageModel(model, tokenizer, autocast), tasks=["lambada_openai"])

The harness cuts contexts and continuations into tokens as for its class for Hugging Face, whose
scores an exported model has. Each of N ranks is given all requests, computes a part of the batches
and returns all ranks' answers: the batches are those of one process.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

import hellaswag
from configurator import configure
from corpus import DataError
from run import sampling, trained
from scale import parallel
from settings import TrainedConfig
from system.errors import UserError, listed

NEW_TOKENS = 256  # at most, of a text whose task does not say how many
KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_k"}  # generation settings


@dataclass
class Settings(TrainedConfig):
    batch_tokens: int = 4096  # tokens per forward pass
    bos: bool = False  # the separator of documents precedes each text, as in training
    seed: int = 1337  # of texts that are sampled


@register_model("checkpoint")
class LanguageModel(TemplateLM):
    """A model and its tokenizer, which answer the harness's requests.

    bos: the separator precedes each text.
    batch_tokens: in a forward pass that scores; 4,096 have 0.8 GB of logits in GPT-2's vocabulary.
    """

    def __init__(self, model, tokenizer, autocast, batch_tokens=4096, bos=False, seed=0):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.autocast = autocast
        self.batch_tokens = batch_tokens
        self.bos = bos
        self.seed = seed
        self.limit = model.cfg.block_size
        self._device = parallel.device_of(model)

    @classmethod
    def create_from_arg_obj(cls, arg_dict, additional_config=None):
        """A model of the Settings in --model_args; the harness's batch size is not used."""
        cfg = configure(Settings, [f"--{key}={value}" for key, value in arg_dict.items()])
        _, *loaded = trained.load(cfg)
        return cls(*loaded, cfg.batch_tokens, cfg.bos, cfg.seed)

    @functools.cached_property
    def cache(self):
        """The KV cache of all texts, None where the model suits none."""
        return sampling.make_cache(self.model, self.tokenizer.eot)

    @property
    def eot_token_id(self):
        return self.tokenizer.eot

    def tok_encode(self, string, add_special_tokens=True):
        """A list of ids; the separator is a special token."""
        ids = self.tokenizer.encode(string)
        if self.bos and add_special_tokens:
            return [self.tokenizer.eot, *ids]
        return list(ids)

    def _loglikelihood_tokens(self, requests, **_):
        """[(log p of a continuation, whether each of its tokens is the likeliest)].

        requests: [(texts, ids of the context, ids of the continuation)].
        """
        rows = []
        starts = []
        for texts, context, more in requests:
            if not 1 <= len(more) <= self.limit:
                rule = f"{len(more):,} tokens, of 1 to block_size={self.limit:,}"
                raise DataError(f"a continuation {str(texts)[-60:]} has {rule}")
            row = np.array([*context, *more])[-(self.limit + 1) :]  # the left is cut off, as by hf
            rows.append(row)
            starts.append(len(row) - len(more))
        prepared = hellaswag.Prepared(rows, np.array(starts))
        with self.autocast:
            sums = hellaswag.over_rows(self.measure, 2, self.model, prepared, self.batch_tokens)
        return [(-loss, wrong == 0) for loss, wrong in sums.tolist()]

    def measure(self, idx, targets):
        """(B, T) ids and targets -> (B, 2): loss in nats, count of targets not the likeliest."""
        at = (targets >= 0).any(0).nonzero()[:, 0]  # where a row has a target
        logits, targets = self.model.logits(idx, at), targets[:, at]
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
        found = [0.0] * len(requests)
        for owner, (logp, _) in zip(owners, self._loglikelihood_tokens(parts)):
            found[owner] += logp
        return found

    def generate_until(self, requests, disable_tqdm=False):
        """[the text that continues a context].

        It goes up to a string of `until`, an end, or max_gen_toks tokens.
        """
        if parallel.units(self.model):
            raise UserError("parallel=fsdp: tasks that generate need a whole model a rank, ddp")
        rank, world = parallel.rank_and_size()
        found = {}
        for number in range(rank, len(requests), world):
            found[number] = self.continued(*requests[number].args, self.seed + number)
        for part in parallel.gather_objects(found):
            found |= part
        return [found[number] for number in range(len(requests))]

    def continued(self, context, options, seed):
        """The text that continues a context; options: a task's generation settings."""
        options = normalize_gen_kwargs(options, NEW_TOKENS)
        unknown = options.keys() - KNOWN
        temperature = options.get("temperature", 0)
        if temperature == 0:
            unknown.discard("top_p")
        if unknown:
            raise UserError(f"gen_kwargs: not known here: {listed(sorted(unknown))}")
        most = options["max_gen_toks"]
        if not 0 < most < self.limit:
            rule = f"must be over 0 and below block_size={self.limit}"
            raise UserError(f"gen_kwargs: max_gen_toks={most} {rule}; give max_gen_toks=N")
        ids = self.tok_encode(context)[most - self.limit :] or [self.tokenizer.eot]
        idx = torch.tensor([ids], device=self._device)
        new = []
        text = ""
        with self.autocast:
            choice = (temperature, options.get("top_k"), seed, self.cache)
            for column in sampling.steps(self.model, idx, most, *choice):
                if column.item() in self.tokenizer.ends:
                    break
                new.append(column.item())
                text = self.tokenizer.decode(new)
                places = [text.find(stop) for stop in options["until"] if stop and stop in text]
                if places:
                    return text[: min(places)]
        return text
