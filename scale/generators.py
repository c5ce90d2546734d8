"""The random-number generators of torch, numpy and Python: seeded by rank, saved, and set back by remat."""

import contextlib
import random

import numpy as np
import torch


def seed(number):
    """Seeds all of them on this rank; torch's generators of every device too."""
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def states(device):
    """{"cpu", "cuda" on a GPU, "numpy", "python": tensor}, as `restore` takes them."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    # both are 624 words of the Mersenne Twister, the position in them, and perhaps a second normal number
    _, words, position, has_gauss, gauss = np.random.get_state()
    found["numpy"] = torch.tensor([*words.tolist(), position, has_gauss, gauss], dtype=torch.float64)
    _, words, gauss = random.getstate()
    found["python"] = torch.tensor([*words, gauss is not None, gauss or 0.0], dtype=torch.float64)
    return found


def restore(found, device):
    """Sets the generators as `states` found them; of those that older checkpoints lack, none."""
    torch.set_rng_state(found["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(found["cuda"], device)
    if "numpy" in found:
        *words, position, has_gauss, gauss = found["numpy"].tolist()
        words = np.array(words, dtype=np.uint32)
        np.random.set_state(("MT19937", words, int(position), int(has_gauss), gauss))
    if "python" in found:
        *words, has_gauss, gauss = found["python"].tolist()
        words = tuple(int(word) for word in words)
        random.setstate((3, words, gauss if has_gauss else None))


@contextlib.contextmanager
def kept(device):
    """After it the generators are as before."""
    before = states(device)
    try:
        yield
    finally:
        restore(before, device)


class Drawn:
    """Hooks that note whether a module's forward draws from numpy's or Python's generator."""

    def __init__(self):
        self.found = False

    def begin(self, *_):
        self.before = others()

    def end(self, *_):
        self.found = self.found or self.before != others()


def others():
    """The states of numpy's and of Python's generator, which can be compared."""
    name, words, *more = np.random.get_state()
    return name, words.tobytes(), *more, random.getstate()


class Replay:
    """Has a part of a forward draw the same numbers of numpy and Python when it is computed again.

    torch.utils.checkpoint does the same for torch's own. 20 microseconds a part.
    """

    def __init__(self):
        self.before = None

    @contextlib.contextmanager
    def recorded(self):
        """Around the forward."""
        self.before = np.random.get_state(), random.getstate()
        yield

    @contextlib.contextmanager
    def replayed(self):
        """Around the recomputation, after which the generators are as if it had not been."""
        now = np.random.get_state(), random.getstate()
        np.random.set_state(self.before[0])
        random.setstate(self.before[1])
        try:
            yield
        finally:
            np.random.set_state(now[0])
            random.setstate(now[1])

    def contexts(self):
        """As `context_fn` of torch.utils.checkpoint."""
        return self.recorded(), self.replayed()
