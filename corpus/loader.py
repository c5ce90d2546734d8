"""Batches of rows from shards of tokens, in an order that the seed and a row's number alone decide.

A thread makes a rank's batches ahead, each from B rows that follow one another in the run:

row of the run -> folder whose turn it is, and row of that folder (TokenLoader._read)
-> epoch and place in its order -> first token -> T + 1 tokens (FolderRows.read)
-> x and y, in host memory (TokenLoader._batch)

`next` takes the oldest of these batches to the device and moves the position that is saved.
"""

import functools
import itertools
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool

import numpy as np
import torch

from corpus import DataError, mixture
from corpus.prefetch import prefetched
from corpus.shards import Shards, fingerprint, sampled_digest, whole_digest


class FolderRows:
    """The rows of T + 1 tokens of a folder's split, in the order in which a run reads them.

    Row w of an epoch begins at token w*T; the last one wraps around. Rows that are shuffled, and
    not packed, begin `shift` tokens later in each epoch.
    weight: how many rows of the mixture's period are this folder's.
    """

    def __init__(self, shards, weight, T, shuffle_seed):
        self.shards = shards
        self.weight = weight
        self.T = T
        self.shuffle_seed = shuffle_seed
        self.per_epoch = -(-shards.tokens // T)
        self.shift = 0
        if shuffle_seed is not None and not shards.pack:
            self.shift = round(0.382 * T)  # each epoch cuts other rows (docs/modern.md)
        self.epoch = None  # whose order is kept

    def read(self, row):
        """(ids, whether each carries loss), each (T + 1,), of a row from the start of training."""
        epoch, place = divmod(row, self.per_epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = range(self.per_epoch)
            if self.shuffle_seed is not None:
                generator = np.random.default_rng((self.shuffle_seed, epoch))
                self.order = generator.permutation(self.per_epoch)
        start = int(self.order[place]) * self.T
        return self.shards.read(start + epoch * self.shift % self.T, self.T + 1)


@dataclass(eq=False)
class TokenLoader:
    """Batches for one rank from a split of one folder, or of a mixture (corpus/mixture.py).

    All ranks share one order of rows: micro-step k takes world*B rows from row k*world*B on, and
    rank r of them the B rows from r*B on, so that a global batch holds the same rows for every B
    and world.
    """

    data_dir: str
    split: str
    B: int
    T: int
    rank: int = 0
    world: int = 1
    vocab_size: int = 1 << 32  # the model's; all ids are below this one
    device: str | torch.device = "cpu"
    batch_tokens: int = 0  # of a global batch, for which there must be enough
    allow_data_change: bool = False
    shuffle_seed: int | None = None

    def __post_init__(self):
        self.device = torch.empty(0, device=self.device).device  # with its index
        self.folders = []
        for folder, weight in mixture.folders(str(self.data_dir)):
            shards = Shards(folder, self.split, self.vocab_size)
            self.folders.append(FolderRows(shards, weight, self.T, self.shuffle_seed))
        self.turns = mixture.turns([rows.weight for rows in self.folders])
        shards = [rows.shards for rows in self.folders]
        self.names = [one.folder for one in shards]
        self.tokens = sum(one.tokens for one in shards)
        self.tokenizer = shards[0].tokenizer
        self.eot = shards[0].eot
        self.token_bytes = shards[0].token_bytes
        self.warnings = []
        self._check(shards)
        if self.split == "train":
            # in a thread, for which the end of the process does not wait
            pool = ThreadPool(1)
            self.whole = pool.apply_async(fingerprint, (self.names, whole_digest))
            pool.close()  # it takes no other task; an open one prints a traceback at the end
        self._start_at(0)

    @functools.cached_property
    def fingerprint(self):
        """Tells this data from other data; a script that only reads batches needs none."""
        return fingerprint(self.names, sampled_digest)

    def _check(self, shards):
        """Raises DataError for Shards that do not suffice or do not go together."""
        if self.tokens < self.batch_tokens or min(one.tokens for one in shards) <= self.T:
            raise DataError(
                f"{self.data_dir}: the {self.split} split has {self.tokens:,} tokens; a row of "
                f"block_size={self.T} takes {self.T + 1:,} of each folder, a step "
                f"{max(self.batch_tokens, self.T + 1):,} of all; lower --block_size or "
                "--batch_tokens"
            )
        for one in shards:
            same_ids = np.array_equal(one.token_bytes, self.token_bytes)  # None: unknown
            if one.eot != self.eot or not same_ids:
                raise DataError(
                    f"data_dir={self.data_dir}: {one.folder} has the tokenizer {one.tokenizer}, "
                    f"{shards[0].folder} has {self.tokenizer}; make one again with fineweb.py "
                    "--tokenizer"
                )
            if one.pack and one.pack != self.T:
                self.warnings.append(
                    f"{one.folder} is packed for block_size={one.pack}; others cut more documents"
                )

    def next(self):
        """(x, y), int64 (B, T) on the device; y is one token later, -100 where it has no loss."""
        batch = next(self.prefetched)  # made by _batches
        self.rows += self.world * self.B
        return self._to_device(batch)

    def close(self):
        """Stops the prefetching thread."""
        self.prefetched.close()

    def _start_at(self, row):
        self.rows = row  # returned on all ranks together; prefetched ones do not count
        self.prefetched = prefetched(self._batches(row))  # the first `next` starts the thread

    def _batches(self, row):
        """Yields this rank's batches from a row of the run on, in the thread."""
        # this thread starts on GPU 0, where pinning would allocate a context
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        own = row + self.rank * self.B
        for first in itertools.count(own, self.world * self.B):
            rows = range(first, first + self.B)
            yield self._batch(map(self._read, rows))

    def _read(self, row):
        """As FolderRows.read, of a row of the run, from the folder whose turn it is."""
        periods, turn = divmod(row, len(self.turns))  # whole periods before it, place in its own
        folder, rows_before = self.turns[turn]
        rows = self.folders[folder]
        return rows.read(periods * rows.weight + rows_before)

    def _batch(self, rows):
        """x and y as int32 (2, B, T), half of int64's bytes, in pinned memory for CUDA."""
        batch = torch.empty(
            2, self.B, self.T, dtype=torch.int32, pin_memory=self.device.type == "cuda"
        )
        x, y = batch.numpy()
        for i, (ids, has_loss) in enumerate(rows):
            x[i] = ids[:-1]
            y[i] = ids[1:]
            y[i, ~has_loss[1:]] = -100
        return batch

    def _to_device(self, batch):
        x, y = batch.to(self.device, non_blocking=True)
        return x.long(), y.long()

    def eval_rows(self, tokens):
        """How many rows eval_batches(tokens) has, on all ranks together."""
        return min(tokens, self.tokens - 1) // self.T

    def eval_batches(self, tokens):
        """Yields this rank's (x, y) of rows 0 to tokens//T - 1.

        Rows that fill up the last batch have y = -100.
        """
        shards = self.folders[0].shards
        rows = self.eval_rows(tokens)
        # targets are one token later than x
        if not (rows and shards.read(1, rows * self.T)[1].any()):
            raise DataError(
                f"{self.data_dir}: eval_tokens={tokens} holds no row of block_size={self.T} with "
                "loss; raise --eval_tokens"
            )
        for first in range(0, rows, self.world * self.B):
            own = first + self.rank * self.B
            places = range(own, own + self.B)
            starts = [row * self.T if row < rows else 0 for row in places]
            batch = self._batch([shards.read(start, self.T + 1) for start in starts])
            x, y = self._to_device(batch)
            y[max(0, rows - own) :] = -100
            yield x, y

    def documents(self, rows):
        """(rows,): number of the document in which a row begins; if eot is unknown, of the row."""
        if self.eot is None:
            return np.arange(rows)
        ids, _ = self.folders[0].shards.read(0, rows * self.T)
        return np.cumsum(ids == self.eot)[:: self.T]

    def describe(self, tokens):
        """Rows of the start-up summary of a run over `tokens` tokens; None: they are not known."""
        found = [("tokenizer", str(self.tokenizer))]
        for rows in self.folders:
            part = rows.weight / len(self.turns)
            words = f"{rows.shards.folder}: {rows.shards.tokens:,} tokens, {part:.1%} of the rows"
            if tokens:
                words += f", {tokens / self.T * part / rows.per_epoch:.2g} epochs"
            found.append(("data", words))
        return found + [("warning", words) for words in self.warnings]

    def state_dict(self):
        """A run's position, after `rows` rows, and what tells other data from this."""
        state = {
            "rows": self.rows,
            "fingerprint": self.fingerprint,
            "block_size": self.T,
            "shuffle_seed": self.shuffle_seed,
            "shares": [rows.weight for rows in self.folders],
        }
        if self.rows:  # so that nothing waits at the start for files to be read
            state["whole_data"] = self.whole.get()
        return state

    def load_state_dict(self, state):
        """Continues exactly after the saved row, for any B and world.

        Raises DataError for other data.
        """
        self.close()
        self._start_at(state["rows"])
        differ = []
        for key, own in self.state_dict().items():  # whole_data may be absent
            if state.get(key, own) != own:
                differ.append(f"{key} {own}, not {state[key]}")
        if differ:
            words = f"{self.data_dir} is not the data of the checkpoint: {'; '.join(differ)}"
            if not self.allow_data_change:
                raise DataError(f"{words}; to go on with it anyway: --allow_data_change")
            self.warnings.append(
                f"{words}; goes on at row {self.rows:,}: rows may be read again or left out"
            )
