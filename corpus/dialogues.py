"""Dialogues, or prompts with completions, to tokens of which the answers alone carry loss.

    python fineweb.py --dataset=chats.jsonl --text_key=messages --tokenizer=path/to/folder
    python fineweb.py --dataset=pairs.jsonl --text_key=prompt,completion

corpus/chat.py renders the template, and special tokens in the rendered text are parsed. An answer is what a
dialogue has more than the dialogue before it with a generation prompt, up to the answer's last special token.
"""

import contextlib
import hashlib
import json

import numpy as np

from configurator import UserError
from corpus import DataError, chat
from corpus.tokenizer import file_of


class Dialogues:
    """The chat template of a Hugging Face tokenizer's folder; `template` is None where there is none.

    eos: the id that ends a completion. digest: of all that decides the tokens besides the tokenizer.
    """

    def __init__(self, tokenizer):
        file, folder = file_of(tokenizer.name), tokenizer.folder
        self.tokenizer, self.template, self.eos, special = tokenizer, None, tokenizer.eot, {}
        if file and file.suffix == ".json":
            special = chat.special_tokens(folder)
            with contextlib.suppress(chat.NoTemplate):
                self.template = chat.Template(folder, tokenizer)
            import tokenizers

            self.inner = tokenizers.Tokenizer.from_file(str(file))  # unlike the tokenizer's, it gives offsets
            self.inner.no_truncation()
            self.inner.no_padding()
            self.parsed = {i for i, token in self.inner.get_added_tokens_decoder().items() if token.special}
            eos = self.inner.token_to_id(special.get("eos_token", ""))
            self.eos = tokenizer.eot if eos is None else eos
            self.ends = {tokenizer.eot} | chat.stop_ids(folder, tokenizer)
        decisive = [self.template and self.template.text, special]
        self.digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
        self.warnings = []
        self.row = np.dtype([("token", tokenizer.dtype), ("loss", bool)])

    def rows(self, documents):
        """Yields an array of (token, loss) for each list of messages or pair; it is empty without answers."""
        for document in documents:
            if document in (None, (None, None)):
                yield np.empty(0, self.row)
            elif isinstance(document, tuple) and self.template is None:
                yield self._pair(*document)
            elif isinstance(document, tuple):
                roles = zip(("user", "assistant"), document)
                yield self._dialogue([{"role": role, "content": content} for role, content in roles])
            else:
                yield self._dialogue(document)

    def _pair(self, prompt, completion):
        """Separator, prompt, completion and eos; where that is the separator, the next document's serves."""
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
        if self.template is None:
            advice = "give a folder with one, or prompts and completions: --text_key=prompt,completion"
            raise UserError(f"tokenizer={self.tokenizer.name} has no chat template; {advice}")
        if not isinstance(messages, list) or not all(isinstance(m, dict) and m.get("role") for m in messages):
            raise DataError(f"expected a list of {{role, content}}, got {messages!r:.90}")
        # datasets fills fields with None
        messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            return np.empty(0, self.row)
        text = self.template.render(messages)
        encoded = self.inner.encode(text, add_special_tokens=False)
        begins, ends = np.array(encoded.offsets).reshape(-1, 2).T
        row = np.zeros(len(begins), self.row)
        row["token"] = encoded.ids
        for i in answers:
            before = self.template.render(messages[:i], add_generation_prompt=True)
            after = self.template.render(messages[: i + 1])
            if not (text.startswith(after) and after.startswith(before)):
                other = f"renders message {i + 1} otherwise when others follow; cut the dialogue after it"
                raise DataError(f"the chat template {other}, or change the template")
            inside = np.flatnonzero((ends > len(before)) & (begins < len(after)))
            special = [n for n, token in enumerate(row["token"][inside]) if int(token) in self.parsed]
            row["loss"][inside[: special[-1] + 1] if special else inside] = True
            if special and (end := int(row["token"][inside[special[-1]]])) not in self.ends:
                self.ends.add(end)
                found = f"answers end with {self.inner.id_to_token(end)}, at which samples do not stop"
                self.warnings.append(f"{found}: name it as eos_token in tokenizer_config.json")
        if not row["loss"].any():
            return row[:0]
        words = "the chat template has the separator within dialogues: --document_mask would cut them"
        if self.tokenizer.eot in row["token"][1:] and words not in self.warnings:
            self.warnings.append(words)
        if row["token"][0] == self.tokenizer.eot:
            return row
        return np.concatenate([np.array([(self.tokenizer.eot, False)], self.row), row])
