"""Chat templates: dialogues, or prompts with completions, as tokens; answers alone carry loss."""

import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import uuid
from pathlib import Path

import jinja2.ext
import jinja2.sandbox
import numpy as np

from corpus import DataError, as_user_error
from corpus.tokenizer import HuggingFace, read_beside, special_tokens
from system.errors import UserError

# Before and after an answer while a template is rendered; a filter leaves digits as they are
MARK = f"\ufdd0{uuid.uuid4().int}\ufdd0"
ROLES = dict.fromkeys("assistant model gpt bot ai chatgpt".split(), "assistant")
ROLES |= dict(user="user", human="user", system="system")
SHAREGPT = {"from": "role", "value": "content"}  # its names for a message's keys
# keys that say whether an answer carries loss; a train_detail, of axolotl, is refused
WEIGHTS = ("weight", "train", "training", "train_detail")


def stop_ids(folder, tokenizer):
    """The ids that a folder's files name, or its template writes, as the end of a text or reply."""
    settings = read_beside(folder, "config.json") | read_beside(folder, "generation_config.json")
    found = settings.get("eos_token_id")
    if not isinstance(found, list):
        found = [found]
    found.append(tokenizer.special.get(special_tokens(folder).get("eos_token")))
    with contextlib.suppress(UserError):  # a template that is missing, or fails
        found.append(Template(folder, tokenizer).end_of_turn())
    return {i for i in found if type(i) is int}


def template_of(folder):
    """The text of a folder's chat template, None if it has none."""
    path = Path(folder, "chat_template.jinja")
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    return read_beside(folder, "tokenizer_config.json").get("chat_template")


class Generation(jinja2.ext.Extension):
    """{% generation %} of transformers: what it encloses is an answer, and gets MARK around it."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller):
        return MARK + caller() + MARK


def raise_exception(words):
    raise jinja2.TemplateError(words)


def strftime_now(form):
    return datetime.datetime.now().strftime(form)


class Template:
    """A folder's chat template, as the model was trained to read conversations.

    Raises UserError if there is none, or it is not valid.
    """

    def __init__(self, folder, tokenizer):
        self.folder = folder
        self.tokenizer = tokenizer
        self.special = special_tokens(folder)
        self.text = template_of(folder) if isinstance(tokenizer, HuggingFace) else None
        if self.text is None:
            raise UserError(
                f"{folder or tokenizer.name} has no chat template; give a folder with one, "
                "--tokenizer=FOLDER"
            )
        self.marks_answers = "endgeneration" in self.text
        # a sandbox, where a template reaches nothing but what it is given
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        environment.globals |= dict(strftime_now=strftime_now, raise_exception=raise_exception)
        with as_user_error(f"{folder}: its chat template fails"):
            self.compiled = environment.from_string(self.text)

    def ids(self, messages):
        """The ids of [{"role": "user", "content": ...}, ...] up to where the next reply begins."""
        text, _ = self.render(messages, reply=True)
        return self.tokenizer.parse(text).ids

    def render(self, messages, tools=None, reply=False):
        """(text of a conversation, [(begin, end)] of what {% generation %} encloses in it).

        With `reply` the text ends where a reply begins. Raises UserError.
        """
        values = dict(messages=messages, tools=tools, documents=None, add_generation_prompt=reply)
        # a template computes, so that any error can come of it
        with as_user_error(f"{self.folder}: its chat template fails"):
            text = self.compiled.render(self.special | values)
        pieces = text.split(MARK)  # every second one is an answer
        ends = [*itertools.accumulate(map(len, pieces))]
        return "".join(pieces), [*zip(ends[::2], ends[1::2])]

    def tokens(self, messages, tools=None):
        """(ids, whether each carries loss) of a conversation whose answers carry loss.

        Without an answer both are empty. Raises UserError.
        """
        wanted = [carries_loss(one) for one in messages if one["role"] == "assistant"]
        if not any(wanted):
            return [], []
        text, answers = self.render(messages, tools)
        marked = self.marks_answers and all(wanted)
        if not marked:
            answers = self._answers(messages, tools, text)
        encoded = self.tokenizer.parse(text)
        loss = np.zeros(len(encoded.ids), bool)
        for begin, end in answers:
            loss[self._place(encoded, text, begin, end, marked)] = True
        return encoded.ids, loss

    def _answers(self, messages, tools, text):
        """[(begin, end)] of answers that carry loss; each begins behind its generation prompt."""
        found = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and carries_loss(message):
                before, _ = self.render(messages[:i], tools, reply=True)
                after, _ = self.render(messages[: i + 1], tools)
                if not (text.startswith(after) and after.startswith(before)):
                    raise DataError(
                        f"the chat template renders message {i + 1} otherwise when others follow; "
                        "cut the dialogue after it"
                    )
                found.append((len(before), len(after)))
        return found

    def _place(self, encoded, text, begin, end, marked):
        """The slice of the tokens of an answer and of the special token that ends it.

        The template may write that one behind what it marks, or as the next role's token.
        """
        begins, ends = np.array(encoded.offsets).T  # in characters
        first = np.searchsorted(ends, begin, "right")
        after = np.searchsorted(begins, end)
        # characters but for blanks: the answer's last one, and the next one behind it
        last = begin + len(text[begin:end].rstrip()) - 1
        behind = len(text) - len(text[end:].lstrip())
        for place in np.searchsorted(ends, [last, behind], "right"):
            if first <= place < len(ends) and encoded.ids[place] in self.tokenizer.special.values():
                return slice(first, max(after, place + 1) if marked else place + 1)
        return slice(first, after)

    def end_of_turn(self):
        """The id of the special token that ends an answer, None if the template writes none."""
        talk = [dict(role=role, content="a") for role in ("user", "assistant", "user")]
        for messages in (talk, talk[:2]):  # some templates render only one of them
            with contextlib.suppress(UserError):
                ids, loss = self.tokens(messages)
                ends = np.array(ids)[loss].tolist()
                if ends and ends[-1] in self.tokenizer.special.values():
                    return ends[-1]


def carries_loss(message):
    """Whether an answer does, by its `weight` (of OpenAI's files) or `train` (of axolotl's)."""
    for key in WEIGHTS:
        if message.get(key, True) not in (0, 1):
            raise DataError(f"{key}={message[key]!r} of a message; expected 0 or 1")
    return all(message.get(key, True) for key in WEIGHTS)


def normalized(messages):
    """[{"role": ..., "content": ...}, ...] of messages, ShareGPT's too; DataError for others."""
    found = []
    with as_user_error("expected a list of {role, content}", DataError):
        for given in messages:
            message = {SHAREGPT.get(k, k): v for k, v in given.items() if v is not None}
            content = message.get("content")
            if isinstance(content, list):  # of parts, as OpenAI's files may have it
                message["content"] = content = "".join(part["text"] for part in content)
            if not isinstance(content, str) and "tool_calls" not in message:
                raise TypeError(f"no text in {given!r:.60}")
            for call in message.get("tool_calls", []):
                function = call.get("function", call)
                if isinstance(function["arguments"], str):  # of JSON, which a template writes again
                    function["arguments"] = json.loads(function["arguments"] or "{}")
            role = message["role"]
            found.append(message | {"role": ROLES.get(role.lower(), role)})
    return found


class Dialogues:
    """Dialogues, or pairs of a question and an answer, to tokens with a folder's chat template.

    tally: counts what is left out.
    """

    def __init__(self, tokenizer, tally):
        self.tokenizer = tokenizer
        self.tally = tally
        self.template = Template(tokenizer.folder, tokenizer)

    def digest(self):
        """SHA-256 of what tells it from others: the tokenizer and the template."""
        parts = [self.tokenizer.digest(), self.template.text, self.template.special]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def rows(self, documents):
        """Yields an array of (token, loss) for each Document, empty without answers."""
        for document in documents:
            ids = loss = []
            if document.value is not None:
                try:
                    ids, loss = self._tokens(document)
                except (UserError, ValueError) as error:  # its tools may be no JSON
                    self.tally.bad(document.where, error)
            row = np.zeros(len(ids), [("token", self.tokenizer.dtype), ("loss", bool)])
            row["token"] = ids
            row["loss"] = loss
            yield row

    def _tokens(self, document):
        """(ids, whether each carries loss) of a document."""
        messages = document.value
        if isinstance(messages, tuple):
            messages = [dict(role=r, content=c) for r, c in zip(("user", "assistant"), messages)]
        tools = document.tools
        if isinstance(tools, str):
            tools = json.loads(tools)
        ids, loss = self.template.tokens(normalized(messages), tools)
        if not any(loss):
            self.tally.add("dialogues without an answer left out", document.where)
            return [], []
        if ids[0] != self.tokenizer.eot:
            ids = [self.tokenizer.eot, *ids]
            loss = [False, *loss]
        return ids, loss
