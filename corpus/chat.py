"""Chat templates: dialogues, or prompts with completions, as tokens of which answers alone carry loss."""

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

from corpus import DataError, told
from corpus.tokenizer import HuggingFace, read_beside, refuse_link, special_tokens, without_surrogates
from errors import UserError

MARKS = "\ufdd0\ufdd1"  # around an answer while a template is rendered; Unicode has them for such uses


def stop_ids(folder, tokenizer):
    """The ids that a folder's files name as the end of a text or of a reply, as a set."""
    files = [read_beside(folder, name) for name in ("generation_config.json", "config.json")]
    found = next((file["eos_token_id"] for file in files if file.get("eos_token_id") is not None), [])
    ids = {i for i in (found if isinstance(found, list) else [found]) if type(i) is int}
    token = tokenizer.encode_special(special_tokens(folder).get("eos_token", ""))
    return ids.union(token if len(token) == 1 else [])  # another tokenizer may not have it


def template_of(folder):
    """The text of a folder's chat template, None if it has none."""
    path = Path(folder, "chat_template.jinja")
    if path.is_file():
        refuse_link(path)
        return path.read_text(encoding="utf-8", errors="replace")
    found = read_beside(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several of them
        named = [entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = named[-1].get("template") if named else None
    return found if isinstance(found, str) else None


class Generation(jinja2.ext.Extension):
    """{% generation %} of transformers: what it encloses is an answer, and gets MARKS around it."""

    tags = {"generation"}

    def parse(self, parser):
        self.environment.marks = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller):
        return MARKS[0] + caller() + MARKS[1]


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox: a template reaches nothing but what it is given."""

    marks = False  # whether the template has {% generation %}

    def refuse(self, words):
        raise jinja2.TemplateError(words)


class Template:
    """A folder's chat template, as the model was trained to read conversations; text: None if it has none."""

    def __init__(self, folder, tokenizer):
        extensions = ["jinja2.ext.loopcontrols", Generation]
        options = dict(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.environment = environment = Sandbox(**options)
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.globals["raise_exception"] = environment.refuse
        self.folder, self.tokenizer = folder, tokenizer
        self.compiled = functools.cache(environment.from_string)
        self.text, self.special = (template_of(folder), special_tokens(folder)) if folder else (None, {})

    def ids(self, messages):
        """The ids of [{"role": "user", "content": ...}, ...] up to where the next reply begins."""
        ids = self.tokenizer.encode_special(self.render(messages, reply=True)[0])
        if ids and max(ids) >= self.tokenizer.embedded:
            raise UserError(f"{self.folder}: its template gives the id {max(ids)}, which the model lacks")
        return ids

    def render(self, messages, reply=False):
        """(text of a conversation, perhaps with the beginning of a reply; its parts in {% generation %}).

        A part is the places of its first character and of the one after its last. Raises UserError.
        """
        if self.text is None:
            name, advice = self.folder or self.tokenizer.name, "give a folder with one, --tokenizer=FOLDER"
            raise UserError(f"{name} has no chat template; {advice}")
        values = dict(messages=messages, add_generation_prompt=reply, tools=None, documents=None)
        with told(f"{self.folder}: its chat template fails"):  # it computes: any error can come of it
            if re.search(f"[{MARKS}]", json.dumps(messages, ensure_ascii=False, default=str)):
                raise ValueError("a message holds U+FDD0 or U+FDD1, which are no characters")
            text = without_surrogates(self.compiled(self.text).render(self.special | values))
        before, *pieces = re.split(f"[{MARKS}]", text)  # inside and outside by turns
        ends = itertools.accumulate(map(len, pieces), initial=len(before))
        return "".join([before, *pieces]), [*itertools.pairwise(ends)][::2]


class Dialogues:
    """Dialogues and pairs to tokens, with the chat template of a tokenizer's folder if there is one."""

    def __init__(self, tokenizer):
        folder = tokenizer.folder if isinstance(tokenizer, HuggingFace) else None
        self.tokenizer, self.template = tokenizer, Template(folder, tokenizer)
        token = tokenizer.encode_special(self.template.special.get("eos_token", ""))
        self.eos = token[0] if len(token) == 1 else tokenizer.eot  # ends a completion
        parts = json.dumps([self.template.text, self.template.special], sort_keys=True)
        self.digest = hashlib.sha256(parts.encode()).hexdigest()
        self.row = np.dtype([("token", tokenizer.dtype), ("loss", bool)])

    def rows(self, documents):
        """Yields an array of (token, loss) for each list of messages or pair; it is empty without answers."""
        for document in documents:
            if document in (None, (None, None)):
                yield np.empty(0, self.row)
            else:
                yield self._pair(*document) if isinstance(document, tuple) else self._dialogue(document)

    def _pair(self, prompt, completion):
        """Separator, prompt, completion and eos; where that is the separator, the next document's serves."""
        if self.template.text is not None:
            pair = dict(role="user", content=prompt), dict(role="assistant", content=completion)
            return self._dialogue([*pair])
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            raise DataError(f"prompt and completion must be texts, got {[prompt, completion]!r:.90}")
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
            raise DataError(f"expected a list of {{role, content}}, got {messages!r:.90}")
        messages = [{k: v for k, v in m.items() if v is not None} for m in messages]  # datasets adds None
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            return np.empty(0, self.row)
        text, parts = self.template.render(messages)
        encoded = self.tokenizer.parse(text)
        ids, (begins, ends) = encoded.ids, np.array(encoded.offsets).reshape(-1, 2).T
        row = np.zeros(len(ids), self.row)
        row["token"] = ids
        for begin, end in parts:
            row["loss"][(ends > begin) & (begins < end)] = True
        if self.template.environment.marks:
            answers = ()
        for i in answers:  # loss from the generation prompt to the answer's last special token
            before, _ = self.template.render(messages[:i], reply=True)
            after, _ = self.template.render(messages[: i + 1])
            if not (text.startswith(after) and after.startswith(before)):
                other = f"renders message {i + 1} otherwise when others follow"
                raise DataError(f"the chat template {other}; cut the dialogue after it")
            inside = np.flatnonzero((ends > len(before)) & (begins < len(after)))
            special = [n for n in inside if ids[n] in self.tokenizer.special.values()]
            row["loss"][inside[inside <= special[-1]] if special else inside] = True
        if not row["loss"].any():
            return row[:0]
        separator = np.array((self.tokenizer.eot, False), self.row)
        return row if ids[0] == self.tokenizer.eot else np.insert(row, 0, separator)
