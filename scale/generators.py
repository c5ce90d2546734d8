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
    """Sets the generators as `states` found them. One that `found` lacks, as in older checkpoints, stays."""
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


def others():
    """The states of numpy's and of Python's generator, cheaper than those of `states`, for set_others."""
    return np.random.get_state(), random.getstate()


def set_others(found):
    np.random.set_state(found[0])
    random.setstate(found[1])


class Drawn:
    """Hooks that note whether a module's forward draws from numpy's or Python's generator."""

    def __init__(self):
        self.found = False

    def begin(self, *_):
        self.before = others()

    def end(self, *_):
        (numpy_before, python_before), (numpy_now, python_now) = self.before, others()
        same_words = np.array_equal(numpy_before[1], numpy_now[1]) and numpy_before[2:] == numpy_now[2:]
        self.found = self.found or not same_words or python_before != python_now


class Replay:
    """Has a part of a forward draw the same numbers of numpy and Python when it is computed again.

    torch.utils.checkpoint does the same for torch's own. 20 microseconds a part.
    """

    def __init__(self):
        self.before = None

    @contextlib.contextmanager
    def recorded(self):
        """Around the forward."""
        self.before = others()
        yield

    @contextlib.contextmanager
    def replayed(self):
        """Around the recomputation, after which the generators are as if it had not been."""
        now = others()
        set_others(self.before)
        try:
            yield
        finally:
            set_others(now)

    def contexts(self):
        """As `context_fn` of torch.utils.checkpoint."""
        return self.recorded(), self.replayed()
