"""Chat templates: dialogues, or prompts with completions, as tokens; answers alone carry loss."""

import datetime
import functools
import hashlib
import itertools
import json
import re
import uuid

import jinja2.ext
import jinja2.sandbox
import numpy as np

from corpus import DataError, as_user_error
from corpus.tokenizer import (
    HuggingFace,
    file_beside,
    read_beside,
    special_tokens,
)
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
    found += [eos_id(folder, tokenizer), Template(folder, tokenizer).end_of_turn()]
    return {i for i in found if type(i) is int}


def eos_id(folder, tokenizer):
    """The id of the eos_token of a folder's files; None if they or the tokenizer lack it."""
    ids = tokenizer.encode_special(special_tokens(folder).get("eos_token", ""))
    return ids[0] if len(ids) == 1 else None


def template_of(folder):
    """The text of a folder's chat template, None if it has none."""
    path = file_beside(folder, "chat_template.jinja")
    if path:
        return path.read_text(encoding="utf-8", errors="replace")
    found = read_beside(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several of them
        return {one["name"]: one["template"] for one in found}.get("default")
    return found


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

    text: None if the folder has none.
    """

    def __init__(self, folder, tokenizer):
        self.folder = folder
        self.tokenizer = tokenizer
        self.text = template_of(folder)
        self.special = special_tokens(folder)
        self.marks_answers = re.search(r"{%[-+]?\s*generation\b", self.text or "")

    @functools.cached_property
    def compiled(self):
        """In Jinja's sandbox, where a template reaches nothing but what it is given."""
        self.refuse_none()
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        environment.globals |= dict(strftime_now=strftime_now, raise_exception=raise_exception)
        return environment.from_string(self.text)

    def refuse_none(self):
        if self.text is None:
            raise UserError(
                f"{self.folder or self.tokenizer.name} has no chat template; give a folder with "
                "one, --tokenizer=FOLDER"
            )

    def ids(self, messages):
        """The ids of [{"role": "user", "content": ...}, ...] up to where the next reply begins."""
        text, _ = self.render(messages, reply=True)
        ids = self.tokenizer.encode_special(text)
        if max(ids, default=0) >= self.tokenizer.embedded:
            raise UserError(
                f"{self.folder}: its template gives the id {max(ids)}, which the model lacks"
            )
        return ids

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
        if not self.marks_answers:
            answers = self._answers(messages, tools, text)
        if not all(wanted):
            if len(answers) != len(wanted):
                raise DataError(f"the chat template marks {len(answers)} of {len(wanted)} answers")
            answers = [*itertools.compress(answers, wanted)]
        encoded = self.tokenizer.parse(text)
        loss = np.zeros(len(encoded.ids), bool)
        for begin, end in answers:
            loss[self._place(encoded, text, begin, end)] = True
        return encoded.ids, loss

    def _answers(self, messages, tools, text):
        """[(begin, end)] of answers in the whole text, each after its generation prompt."""
        found = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before, _ = self.render(messages[:i], tools, reply=True)
                after, _ = self.render(messages[: i + 1], tools)
                if not (text.startswith(after) and after.startswith(before)):
                    raise DataError(
                        f"the chat template renders message {i + 1} otherwise when others follow; "
                        "cut the dialogue after it"
                    )
                found.append((len(before), len(after)))
        return found

    def _place(self, encoded, text, begin, end):
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
                return slice(first, max(after, place + 1) if self.marks_answers else place + 1)
        return slice(first, after)

    def end_of_turn(self):
        """The id of the special token that ends an answer, None if no template writes one."""
        if self.text is None or not isinstance(self.tokenizer, HuggingFace):
            return None
        talk = [dict(role=role, content="a") for role in ("user", "assistant", "user")]
        for messages in (talk, talk[:2]):  # some templates render only one of them
            try:
                ids, loss = self.tokens(messages)
            except UserError:
                continue
            ends = np.array(ids)[loss].tolist()
            if ends and ends[-1] in self.tokenizer.special.values():
                return ends[-1]
        return None


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
            if isinstance(message.get("content"), list):  # of parts, as OpenAI's files may have it
                message["content"] = "".join(part["text"] for part in message["content"])
            calls = message.get("tool_calls", [])
            if not isinstance(message.get("content", "" if calls else None), str):
                raise TypeError(f"no text in {given!r:.60}")
            for call in calls:
                function = call.get("function", call)
                if isinstance(function["arguments"], str):  # of JSON, likewise
                    function["arguments"] = json.loads(function["arguments"] or "{}")
            role = message["role"]
            found.append(message | {"role": ROLES.get(role.lower(), role)})
    return found


class Dialogues:
    """Dialogues or pairs to tokens, with the chat template of a tokenizer's folder if any.

    tally: counts what is left out.
    """

    def __init__(self, tokenizer, tally, pairs):
        folder = tokenizer.folder
        self.tokenizer = tokenizer
        self.tally = tally
        self.pairs = pairs
        self.template = Template(folder, tokenizer)
        if not pairs:
            self.template.refuse_none()
        self.eos = eos_id(folder, tokenizer)  # ends a completion
        if self.eos is None:
            self.eos = tokenizer.eot

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
        if self.pairs:
            if self.template.text is None:
                return self._pair(document)
            messages = [dict(role=r, content=c) for r, c in zip(("user", "assistant"), messages)]
        tools = document.tools
        if isinstance(tools, str):
            tools = json.loads(tools)
        messages = normalized(messages)
        ids, loss = self.template.tokens(messages, tools)
        if not any(loss):
            self.tally.add("dialogues without an answer left out", document.where)
            return [], []
        if ids[0] != self.tokenizer.eot:
            ids = [self.tokenizer.eot, *ids]
            loss = [False, *loss]
        return ids, loss

    def _pair(self, document):
        """Separator, prompt, completion and eos.

        Where eos is the separator, that of the next document serves.
        """
        prompt, completion = self.tokenizer.encode_batch(document.value)
        if not len(completion):
            self.tally.add("pairs without a completion left out", document.where)
            return [], []
        ends = [self.eos] if self.eos != self.tokenizer.eot else []
        ids = [self.tokenizer.eot, *prompt, *completion, *ends]
        loss = np.arange(len(ids)) > len(prompt)
        loss[0] = not ends
        return ids, loss
