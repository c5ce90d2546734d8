"""Dialogues to tokens of which the answers alone carry loss: a Hugging Face chat template, or prompt and completion.

    python fineweb.py --dataset=chats.jsonl --text_key=messages --tokenizer=path/to/folder
    python fineweb.py --dataset=pairs.jsonl --text_key=prompt,completion

The template is rendered as transformers does it, special tokens in the rendered text are parsed, and an answer is what
a dialogue with it has more than the same dialogue before it with a generation prompt, up to its last special token.
"""

import datetime
import functools
import hashlib
import json
from pathlib import Path

import jinja2.ext
import jinja2.sandbox
import numpy as np

from configurator import UserError
from corpus.loader import DataError
from corpus.tokenizer import without_surrogates
from run.files import read_json


class Dialogues:
    """The chat template of a Hugging Face tokenizer's folder; `template` is None where there is none.

    eos: the id that ends a completion. digest: of all that decides the tokens besides the tokenizer.
    """

    def __init__(self, tokenizer):
        path = Path(tokenizer.name)
        folder = path if path.is_dir() else path.parent
        settings = folder / "tokenizer_config.json"
        of_json = path.is_dir() or path.suffix == ".json"  # not the name of an encoding
        found = read_json(settings, UserError) if of_json and settings.is_file() else {}
        self.tokenizer = tokenizer
        self.special = {k: _content(found[k]) for k in ("bos_token", "eos_token") if found.get(k)}
        self.template = found.get("chat_template")
        if found and (folder / "chat_template.jinja").is_file():
            self.template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        if isinstance(self.template, list):  # several, by name
            self.template = {entry["name"]: entry["template"] for entry in self.template}.get("default")
        self.digest = hashlib.sha256(json.dumps([self.template, self.special]).encode()).hexdigest()
        self.warnings = []
        self.row = np.dtype([("token", tokenizer.dtype), ("loss", bool)])
        self.eos = tokenizer.eot
        if found:
            import tokenizers

            file = folder / "tokenizer.json" if path.is_dir() else path
            self.inner = tokenizers.Tokenizer.from_file(str(file))  # unlike the tokenizer's, it parses special tokens
            self.inner.no_truncation()
            self.inner.no_padding()
            self.parsed = {i for i, token in self.inner.get_added_tokens_decoder().items() if token.special}
            eos = self.inner.token_to_id(self.special.get("eos_token", ""))
            self.eos = tokenizer.eot if eos is None else eos

    def rows(self, documents):
        """Yields for each document, a list of messages or a pair, its array of (token, loss); empty without answers."""
        for document in documents:
            if isinstance(document, tuple) and self.template is None:
                yield self._pair(*document)
            elif isinstance(document, tuple):
                roles = zip(("user", "assistant"), document)
                yield self._dialogue([{"role": role, "content": content} for role, content in roles])
            else:
                yield self._dialogue(document)

    def _pair(self, prompt, completion):
        """The separator, the prompt, the completion and eos; where eos is the separator, the next document's serves."""
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            raise DataError("prompt and completion must be texts, got " + _short([prompt, completion]))
        if not completion:
            return np.empty(0, self.row)
        prompt, completion = (ids.tolist() for ids in self.tokenizer.encode_batch([prompt, completion]))
        shared = self.eos == self.tokenizer.eot
        tokens = [self.tokenizer.eot, *prompt, *completion, *[self.eos] * (not shared)]
        row = np.zeros(len(tokens), self.row)
        row["token"], row["loss"] = tokens, np.arange(len(tokens)) > len(prompt)
        row["loss"][0] = shared
        return row

    def _dialogue(self, messages):
        if not isinstance(messages, list) or not all(isinstance(m, dict) and m.get("role") for m in messages):
            raise DataError("expected a list of {role, content}, got " + _short(messages))
        messages = [{k: v for k, v in m.items() if v is not None} for m in messages]  # datasets fills fields with None
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            return np.empty(0, self.row)
        text = self.render(messages)
        encoded = self.inner.encode(text, add_special_tokens=False)
        begins, ends = np.array(encoded.offsets).reshape(-1, 2).T
        row = np.zeros(len(begins), self.row)
        row["token"] = encoded.ids
        for i in answers:
            before, after = self.render(messages[:i], add_generation_prompt=True), self.render(messages[: i + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise DataError(
                    f"the chat template of {self.tokenizer.name} renders message {i + 1} otherwise when others follow, "
                    "so its tokens cannot be told; cut the dialogue after it, or change the template"
                )
            inside = np.flatnonzero((ends > len(before)) & (begins < len(after)))
            special = [n for n, token in enumerate(row["token"][inside]) if int(token) in self.parsed]
            row["loss"][inside[: special[-1] + 1] if special else inside] = True
        if not row["loss"].any():
            return row[:0]
        if self.tokenizer.eot in row["token"][1:] and not self.warnings:
            self.warnings.append("the chat template has the separator within dialogues: --document_mask would cut them")
        if row["token"][0] == self.tokenizer.eot:
            return row
        return np.concatenate([np.array([(self.tokenizer.eot, False)], self.row), row])

    def render(self, messages, add_generation_prompt=False):
        """The text of a dialogue. Raises UserError without a template, and DataError where the template refuses it."""
        if self.template is None:
            raise UserError(
                f"tokenizer={self.tokenizer.name} has no chat template; give a folder with tokenizer.json and a "
                "tokenizer_config.json that has a chat_template, or pairs: --text_key=prompt,completion"
            )
        options = dict(add_generation_prompt=add_generation_prompt, tools=None, documents=None)
        try:
            return without_surrogates(_compiled(self.template).render(messages=messages, **options, **self.special))
        except Exception as error:  # a template is a program
            what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise DataError(f"the chat template of {self.tokenizer.name} fails on {_short(messages)}: {what}") from None


@functools.cache
def _compiled(template):
    """The template in the environment that transformers gives it."""

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, **options):
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _content(token):
    """The text of a special token, which tokenizer_config.json may wrap in an object."""
    return token["content"] if isinstance(token, dict) else token


def _short(value):
    return repr(value) if len(repr(value)) < 100 else repr(value)[:97] + "..."
