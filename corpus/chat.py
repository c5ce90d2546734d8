"""The files beside a Hugging Face model's weights: the ids at which it stops, and its chat template.

They are generation_config.json, config.json, tokenizer_config.json, special_tokens_map.json and
chat_template.jinja; each may be absent.
"""

import contextlib
import datetime
import functools
import json
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from configurator import UserError
from corpus.tokenizer import without_surrogates
from run.files import read_json


class NoTemplate(UserError):
    """The folder has no chat template."""


def stop_ids(folder, tokenizer):
    """The ids that a folder's files name as the end of a text or of a reply, as a set."""
    files = [_read(folder, name) for name in ("generation_config.json", "config.json")]
    found = next((file["eos_token_id"] for file in files if file.get("eos_token_id") is not None), [])
    ids = {i for i in (found if isinstance(found, list) else [found]) if isinstance(i, int)}
    token = tokenizer.encode_special(special_tokens(folder).get("eos_token", ""))
    return ids.union(token if len(token) == 1 else [])  # another tokenizer may not have it


class Template:
    """The chat template of a folder, which writes a conversation as the model was trained to read it."""

    def __init__(self, folder, tokenizer):
        """Raises UserError if there is none, or if jinja2 cannot read it."""
        options = dict(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment = ImmutableSandboxedEnvironment(**options)
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.globals["raise_exception"] = _raise
        self.folder, self.tokenizer, self.special = folder, tokenizer, special_tokens(folder)
        self.text = _template(folder)
        with self.errors_in_one_line():
            self.template = environment.from_string(self.text)

    def ids(self, messages):
        """The ids of [{"role": "user", "content": ...}, ...] up to where the next reply begins."""
        return self.tokenizer.encode_special(self.render(messages, add_generation_prompt=True))

    def render(self, messages, add_generation_prompt=False):
        """The text of a conversation, with the beginning of a reply if that is asked for."""
        options = dict(add_generation_prompt=add_generation_prompt, tools=None, documents=None)
        with self.errors_in_one_line():
            return without_surrogates(self.template.render(messages=messages, **options, **self.special))

    @contextlib.contextmanager
    def errors_in_one_line(self):
        try:
            yield
        except Exception as error:  # a template computes: any can come of it
            what = " ".join(str(error).split())
            raise UserError(f"{self.folder}: its chat template fails ({what})") from None


def _raise(words):
    raise jinja2.TemplateError(words)


def _template(folder):
    path = Path(folder, "chat_template.jinja")
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    found = _read(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several of them
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        places = "chat_template.jinja, or chat_template in tokenizer_config.json"
        advice = "give the folder of a chat model's tokenizer, --tokenizer=FOLDER, or leave --chat out"
        raise NoTemplate(f"chat: {folder} has no chat template ({places}); {advice}")
    return found


def special_tokens(folder):
    """{"bos_token": "<s>", ...}; each is written as a string or as an object with its `content`."""
    files = _read(folder, "special_tokens_map.json") | _read(folder, "tokenizer_config.json")
    tokens = {k: v.get("content") if isinstance(v, dict) else v for k, v in files.items()}
    return {k: v for k, v in tokens.items() if k.endswith("_token") and isinstance(v, str)}


def _read(folder, name):
    path = Path(folder, name)
    value = read_json(path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object")
    return value
