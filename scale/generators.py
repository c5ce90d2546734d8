"""Random generators of torch, numpy and Python: seeded by rank, saved and set back."""

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
    for name, numbers in zip(("numpy", "python"), others()):
        found[name] = torch.tensor(numbers, dtype=torch.float64)
    return found


def restore(found, device):
    """Sets the generators as `states` found them."""
    torch.set_rng_state(found["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(found["cuda"], device)
    *words, position, has_gauss, gauss = found["numpy"].tolist()
    words = np.array(words, dtype=np.uint32)
    np.random.set_state(("MT19937", words, int(position), int(has_gauss), gauss))
    *words, has_gauss, gauss = found["python"].tolist()
    words = tuple(int(word) for word in words)
    random.setstate((3, words, gauss if has_gauss else None))


@contextlib.contextmanager
def preserved(device):
    """After it the generators are as before."""
    before = states(device)
    try:
        yield
    finally:
        restore(before, device)


def on_host():
    """The states of those that are not a GPU's, to be compared."""
    return others(), torch.get_rng_state().tolist()


def others():
    """The states of numpy's and of Python's generator, as lists of numbers.

    Both: 624 words of the Mersenne Twister, the position in them, whether there is a second normal
    number, and that number.
    """
    _, words, *rest = np.random.get_state()
    _, python_words, gauss = random.getstate()
    return [*words.tolist(), *rest], [*python_words, gauss is not None, gauss or 0.0]
