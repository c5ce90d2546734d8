"""Chat templates: dialogues, or prompts with completions, as tokens; answers alone carry loss."""

import datetime
import functools
import hashlib
import itertools
import json
import re
from pathlib import Path

import jinja2.ext
import jinja2.sandbox
import numpy as np

from corpus import DataError, as_user_error
from corpus.tokenizer import (
    HuggingFace,
    read_beside,
    refuse_link,
    special_tokens,
    without_surrogates,
)
from system.errors import UserError

# They enclose an answer while a template is rendered; Unicode has them for such uses.
MARKS = "\ufdd0\ufdd1"


def stop_ids(folder, tokenizer):
    """The ids that a folder's files name as the end of a text or of a reply, as a set."""
    found = read_beside(folder, "generation_config.json").get("eos_token_id")
    if found is None:
        found = read_beside(folder, "config.json").get("eos_token_id")
    if not isinstance(found, list):
        found = [found]
    return {i for i in [*found, eos_id(folder, tokenizer)] if type(i) is int}


def eos_id(folder, tokenizer):
    """The id of the eos_token of a folder's files; None if they or the tokenizer lack it."""
    ids = tokenizer.encode_special(special_tokens(folder).get("eos_token", ""))
    return ids[0] if len(ids) == 1 else None


def template_of(folder):
    """The text of a folder's chat template, None if it has none."""
    path = Path(folder, "chat_template.jinja")
    if path.is_file():
        refuse_link(path)
        with as_user_error(f"{path} cannot be read"):
            return path.read_text(encoding="utf-8", errors="replace")
    found = read_beside(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several of them
        named = [one for one in found if isinstance(one, dict) and one.get("name") == "default"]
        found = named[-1].get("template") if named else None
    return found if isinstance(found, str) else None


class Generation(jinja2.ext.Extension):
    """{% generation %} of transformers: what it encloses is an answer, and gets MARKS around it."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller):
        return MARKS[0] + caller() + MARKS[1]


def raise_exception(words):
    raise jinja2.TemplateError(words)


def strftime_now(form):
    return datetime.datetime.now().strftime(form)


class Template:
    """A folder's chat template, as the model was trained to read conversations.

    text: None if the folder has none.
    """

    def __init__(self, folder, tokenizer):
        self.folder = folder
        self.tokenizer = tokenizer
        self.text = None if folder is None else template_of(folder)
        self.special = special_tokens(folder)
        self.marks_answers = re.search(r"{%[-+]?\s*generation\b", self.text or "") is not None

    @functools.cached_property
    def compiled(self):
        """In Jinja's sandbox, where a template reaches nothing but what it is given."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        environment.globals |= dict(strftime_now=strftime_now, raise_exception=raise_exception)
        return environment.from_string(self.text)

    def ids(self, messages):
        """The ids of [{"role": "user", "content": ...}, ...] up to where the next reply begins."""
        text, _ = self.render(messages, reply=True)
        ids = self.tokenizer.encode_special(text)
        if ids and max(ids) >= self.tokenizer.embedded:
            raise UserError(
                f"{self.folder}: its template gives the id {max(ids)}, which the model lacks"
            )
        return ids

    def render(self, messages, reply=False):
        """(text of a conversation, [(begin, end)] of what {% generation %} encloses in it).

        With `reply` the text ends where a reply begins. Raises UserError.
        """
        if self.text is None:
            name = self.folder or self.tokenizer.name
            raise UserError(
                f"{name} has no chat template; give a folder with one, --tokenizer=FOLDER"
            )
        values = dict(messages=messages, add_generation_prompt=reply, tools=None, documents=None)
        # a template computes, so that any error can come of it
        with as_user_error(f"{self.folder}: its chat template fails"):
            if re.search(f"[{MARKS}]", json.dumps(messages, ensure_ascii=False, default=str)):
                raise ValueError("a message holds U+FDD0 or U+FDD1, which are no characters")
            text = without_surrogates(self.compiled.render(self.special | values))
        pieces = re.split(f"[{MARKS}]", text)  # every second one is an answer
        ends = [*itertools.accumulate(map(len, pieces))]
        return "".join(pieces), [*zip(ends[::2], ends[1::2])]


class Dialogues:
    """Dialogues and pairs to tokens, with the chat template of a tokenizer's folder if any."""

    def __init__(self, tokenizer):
        folder = tokenizer.folder if isinstance(tokenizer, HuggingFace) else None
        self.tokenizer = tokenizer
        self.template = Template(folder, tokenizer)
        self.eos = eos_id(folder, tokenizer)  # ends a completion
        if self.eos is None:
            self.eos = tokenizer.eot
        parts = json.dumps([self.template.text, self.template.special], sort_keys=True)
        self.digest = hashlib.sha256(parts.encode()).hexdigest()

    def rows(self, documents):
        """Yields an array of (token, loss) for each dialogue or pair, empty without answers."""
        for document in documents:
            if document in (None, (None, None)):
                yield self._row([])
            elif isinstance(document, tuple):
                yield self._pair(*document)
            else:
                yield self._dialogue(document)

    def _row(self, ids):
        """An array of (token, loss), without loss."""
        row = np.zeros(len(ids), [("token", self.tokenizer.dtype), ("loss", bool)])
        row["token"] = ids
        return row

    def _pair(self, prompt, completion):
        """Separator, prompt, completion and eos.

        Where eos is the separator, that of the next document serves.
        """
        if self.template.text is not None:
            question = dict(role="user", content=prompt)
            return self._dialogue([question, dict(role="assistant", content=completion)])
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            raise DataError(
                f"prompt and completion must be texts, got {[prompt, completion]!r:.90}"
            )
        if not completion:
            return self._row([])
        prompt, completion = self.tokenizer.encode_batch([prompt, completion])
        ids = [self.tokenizer.eot, *prompt, *completion]
        if self.eos != self.tokenizer.eot:
            ids.append(self.eos)
        row = self._row(ids)
        row["loss"][0] = self.eos == self.tokenizer.eot
        row["loss"][1 + len(prompt) :] = True
        return row

    def _dialogue(self, messages):
        """A separator and the rendered messages, of which the answers carry loss."""
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and m.get("role") for m in messages
        ):
            raise DataError(f"expected a list of {{role, content}}, got {messages!r:.90}")
        # the package datasets adds None for a key that a message lacks
        messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
        by_assistant = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if not by_assistant:
            return self._row([])
        text, answers = self.template.render(messages)
        if not self.template.marks_answers:
            answers = [self._answer(messages, i, text) for i in by_assistant]
        encoded = self.tokenizer.parse(text)
        row = self._row(encoded.ids)
        begins, ends = np.array(encoded.offsets).reshape(-1, 2).T  # of tokens, in characters
        for begin, end in answers:
            inside = np.flatnonzero((ends > begin) & (begins < end))
            if not self.template.marks_answers:
                inside = self._up_to_last_special(inside, row["token"][inside])
            row["loss"][inside] = True
        if not row["loss"].any():
            return row[:0]
        if encoded.ids[0] != self.tokenizer.eot:
            row = np.concatenate([self._row([self.tokenizer.eot]), row])
        return row

    def _up_to_last_special(self, places, ids):
        """The places up to that of the last special token, which ends the turn; all without one."""
        special = places[np.isin(ids, [*self.tokenizer.special.values()])]
        return places[places <= special[-1]] if len(special) else places

    def _answer(self, messages, i, text):
        """Where answer i, after the generation prompt, begins and ends in the whole text."""
        before, _ = self.template.render(messages[:i], reply=True)
        after, _ = self.template.render(messages[: i + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise DataError(
                f"the chat template renders message {i + 1} otherwise when others follow; "
                "cut the dialogue after it"
            )
        return len(before), len(after)
