"""A model of this repository as lm-evaluation-harness asks one; needs the package lm_eval.

    lm_eval.simple_evaluate(LanguageModel(model, tokenizer, autocast), tasks=["lambada_openai"])

Contexts and continuations are cut into tokens, and long ones shortened, as the harness's class for
Hugging Face does, whose scores an exported model has. Each of N ranks is given all requests,
computes one of N batches, and returns all ranks' answers: the batches are those of one process.
"""

import itertools

import numpy as np
import torch
import torch.nn.functional as F
from lm_eval.api.model import LM
from lm_eval.models.utils import Collator, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn.utils.rnn import pad_sequence

import hellaswag
from corpus import DataError
from run import sampling
from run.logger import progress
from scale import parallel
from system.errors import UserError, refuse, warn

BATCH_TOKENS = {"cuda": 16_384}  # 3.3 GB of logits in GPT-2's vocabulary where all are needed
NEW_TOKENS = 256  # at most, of a text whose task does not say how many
LOOK = 16  # tokens between two looks at whether all texts of a batch have ended
KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_k"}  # generation settings


class LanguageModel(LM):
    """A model and its tokenizer, which answer the harness's requests.

    bos: the separator precedes each text.
    batch_tokens: in a forward pass; None: chosen by the device.
    """

    def __init__(self, model, tokenizer, autocast, batch_tokens=None, bos=False, seed=0):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.autocast = autocast
        self.bos = bos
        self.seed = seed
        self.limit = model.cfg.block_size
        self._device = parallel.device_of(model)
        self.batch_tokens = batch_tokens or BATCH_TOKENS.get(self._device.type, 1024)

    def loglikelihood(self, requests, disable_tqdm=False):
        """[(log p of a continuation, whether each of its tokens is the likeliest)].

        Each request is (context, continuation).
        """
        pairs = [request.args for request in requests]
        contexts = self.encode([context.rstrip() for context, _ in pairs])
        wholes = self.encode([context + more for context, more in pairs])
        rows = []
        starts = []
        for (before, more), context, whole in zip(pairs, contexts, wholes):
            start = len(context)
            if start == 0:  # something must come before the first token
                whole = [self.tokenizer.eot, *whole]
                start = 1
            tokens = max(0, len(whole) - start)
            if not 1 <= tokens <= self.limit:
                rule = f"has {tokens:,} tokens, of 1 to block_size={self.limit:,}"
                raise DataError(f"the continuation {more[:40]!r} of {before[-40:]!r} {rule}")
            rows.append(whole)
            starts.append(start)
        return [(-loss, wrong == 0) for loss, wrong in self.scores(rows, starts)]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """[log p of a whole text].

        Each of its tokens comes after as many as fit, the first one after the separator.
        """
        options = {"prefix_token": self.tokenizer.eot, "max_seq_len": self.limit, "context_len": 1}
        rows = []
        starts = []
        owners = []
        for i, ids in enumerate(self.encode([request.args[0] for request in requests])):
            for window in get_rolling_token_windows(ids, **options):
                context, more = make_disjoint_window(window)
                rows.append([*context, *more])
                starts.append(len(context))
                owners.append(i)
        found = [0.0] * len(requests)
        for owner, (loss, _) in zip(owners, self.scores(rows, starts)):
            found[owner] -= loss
        return found

    def generate_until(self, requests, disable_tqdm=False):
        """[the text that continues a context].

        It goes up to a string of `until`, an end, or max_gen_toks tokens.
        """
        if parallel.units(self.model):
            raise UserError(
                "parallel=fsdp: tasks that generate need --parallel=ddp, a whole model a rank"
            )
        contexts = self.encode([request.args[0] for request in requests])
        asked = []
        for ids, request in zip(contexts, requests):
            options = self.options(request.args[1])
            room = self.limit - options["max_gen_toks"]
            asked.append((ids[-room:] or [self.tokenizer.eot], options))

        def rows(_, alike):
            prompt, options = alike[0]  # the longest
            return max(1, self.batch_tokens // (len(prompt) + options["max_gen_toks"]))

        order = Collator(
            asked,
            sort_fn=lambda one: -len(one[0]),
            group_fn=lambda one: one[1],
            group_by="gen_kwargs",
        )
        batches = list(order.get_batched(batch_fn=rows))
        rank, world = parallel.rank_and_size()
        found = {}
        for number in progress(range(rank, len(batches), world), "texts"):
            found[number] = self.continued(batches[number], self.seed + number)
        for part in parallel.gather_objects(found):
            found |= part
        texts = []
        for number in range(len(batches)):
            texts += found[number]
        return order.get_original(texts)

    def encode(self, texts):
        """A list of ids for each text."""
        before = [self.tokenizer.eot] if self.bos else []
        return [before + ids.tolist() for ids in self.tokenizer.encode_batch(texts)]

    def scores(self, rows, starts):
        """[summed loss in nats, count of tokens not the likeliest] of rows from starts on."""
        if not rows:
            return []
        cuts = [max(0, len(row) - (self.limit + 1)) for row in rows]
        if any(cuts):
            many = f"{np.count_nonzero(cuts):,} of {len(rows):,} rows"
            warn(f"{many} exceed block_size={self.limit:,}: their left is cut off")
        rows = [np.array(row[cut:]) for row, cut in zip(rows, cuts)]
        starts = np.array(starts) - cuts
        prepared = hellaswag.Prepared(rows, starts)
        with self.autocast:
            sums = hellaswag.over_rows(self.measure, 2, self.model, prepared, self.batch_tokens)
        return sums.tolist()

    def measure(self, idx, targets):
        """(B, T) ids and targets -> (B, 2), see `scores`."""
        at = (targets >= 0).any(0).nonzero()[:, 0]  # where a row has a target
        logits, targets = self.model.logits(idx, at), targets[:, at]
        # the loss is 0 where a target is -100
        loss = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        wrong = (logits.argmax(-1) != targets) & (targets >= 0)
        return torch.stack((loss.sum(1), wrong.sum(1)), 1)

    def options(self, given):
        """A task's generation settings in the harness's form, checked."""
        options = normalize_gen_kwargs(given, NEW_TOKENS)
        known = set(KNOWN)
        if not options["do_sample"] or options.get("temperature", 0) <= 0:
            options["temperature"] = 0.0
            known.add("top_p")  # which no greedy choice heeds
        if options.get("num_beams") == 1:
            known.add("num_beams")
        rule = f"is not known here; {', '.join(sorted(KNOWN))} are"
        unknown = sorted(options.keys() - known)
        refuse([f"gen_kwargs: {name}={options[name]} {rule}" for name in unknown])
        most = options["max_gen_toks"]
        if not 0 < most < self.limit:
            rule = f"must be over 0 and below block_size={self.limit}"
            advice = "try --gen_kwargs=max_gen_toks=N"
            raise UserError(f"gen_kwargs: max_gen_toks={most} {rule}; {advice}")
        return options

    def continued(self, batch, seed):
        """The texts that continue a batch of prompts, [(ids, options)], the longest first."""
        options = batch[0][1]
        most = options["max_gen_toks"]
        prompts = [torch.tensor(ids) for ids, _ in batch]
        lengths = torch.tensor([len(ids) for ids in prompts], device=self._device)
        shortest = len(prompts[-1])
        columns = []  # of ids; the first is behind the shortest prompt

        def texts():
            """[(text, whether it is at its end)]"""
            found = []
            for row, prompt in zip(torch.stack(columns, 1).tolist(), prompts):
                own = row[len(prompt) - shortest :]
                found.append(self.until(own[:most], options["until"], most))
            return found

        ids = pad_sequence(prompts, batch_first=True).to(self._device)
        choice = {"top_k": options.get("top_k"), "seed": seed, "lengths": lengths}
        with self.autocast:
            for column in sampling.steps(self.model, ids, most, options["temperature"], **choice):
                columns.append(column)
                if len(columns) % LOOK == 0 and all(ended for _, ended in texts()):
                    break
        return [text for text, _ in texts()]

    def until(self, ids, stops, most):
        """(the text of ids up to where it ends, whether it has ended).

        It ends at an id that ends documents, at a string of stops, or after `most` ids.
        """
        kept = list(itertools.takewhile(lambda i: i not in self.tokenizer.ends, ids))
        text = self.tokenizer.decode(kept)
        places = [text.find(stop) for stop in stops if stop and stop in text]
        ended = len(kept) < len(ids) or bool(places) or len(ids) == most
        return text[: min(places, default=None)], ended
