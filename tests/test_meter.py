"""run/meter.py: a loss spike is warned about once, with the checkpoint to go back to."""

import math
from types import SimpleNamespace

import pytest
import torch

from run.meter import SETTLED, Meter


@pytest.mark.fault(32)
def test_a_spike_is_told_and_noise_is_not():
    said, records = [], []
    log = SimpleNamespace(
        print=said.append, record=lambda kind, step, **values: records.append((kind, step, values))
    )
    saver = SimpleNamespace(last=150)
    meter = Meter(log, saver, None, SimpleNamespace(device=torch.device("cpu")), 0, 0)
    for step in range(1, 4 * SETTLED):
        meter._look_for_spike(step, 8 / math.sqrt(step) + 0.05 * math.sin(step**2))
    assert not said
    meter._look_for_spike(400, 2.0)
    meter._look_for_spike(401, 2.0)
    [line], [(kind, step, values)] = said, records
    assert line.startswith("warning: step 400: loss 2.0000 is ") and line.endswith(
        "last checkpoint: step 150"
    )
    assert (kind, step) == ("spike", 400) and values["z"] > 6
