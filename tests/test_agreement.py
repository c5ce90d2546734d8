"""run/agreement.py: ranks that differ in settings, code or data are told before the first step."""

import shutil

import pytest
import ranks
from conftest import flags, train_each
from test_signals import error_lines

from configurator import configure
from run import agreement, source
from settings import Config
from system.errors import UserError


def attempt(*words):
    return ranks.attempt(len(words), train_each, words, timeout=60)[0]


@pytest.mark.parametrize(
    "settings", [dict(resume="auto"), dict(dry_run=True), dict(parallel="fsdp")]
)
@pytest.mark.fault(87)
def test_another_setting_of_a_rank_is_named_with_both_values(data_dir, tmp_path, settings):
    """Also one on which it depends which collectives there are."""
    own = flags(data_dir, tmp_path / "run", max_steps=2)
    done = attempt(own, flags(data_dir, tmp_path / "run", max_steps=2, **settings))
    assert done.codes == [2, 2] and not (tmp_path / "run/log.jsonl").exists(), done.stderr
    [line] = error_lines(done)
    [(name, value)] = settings.items()
    assert f"rank 1 has {name}={value} instead of {getattr(configure(Config, own), name)}" in line


@pytest.mark.fault(87)
def test_another_copy_of_the_data_is_named_and_a_true_copy_is_none(data_dir, tmp_path):
    copy = shutil.copytree(data_dir, tmp_path / "copy")
    words = [
        flags(folder, tmp_path / "run", max_steps=2, eval_interval=2) for folder in (data_dir, copy)
    ]
    assert attempt(*words).codes == [0, 0]
    for split in ("val", "train"):
        path = next(copy.glob(f"*_{split}_*"))
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
        done = attempt(*([*one, f"--out_dir={tmp_path / 'other'}"] for one in words))
        assert done.codes == [2, 2], done.stderr
        [line] = error_lines(done)
        assert "rank 1 has training data=" in line


@pytest.fixture
def pair(monkeypatch):
    """Gathers this process's last two answers, as of two ranks."""
    pair = []

    def gathered(value):
        pair.append(value)
        return pair[-2:]

    monkeypatch.setattr(agreement.parallel, "gather_objects", gathered)
    return pair


def test_other_code_and_another_torch_are_refused_and_other_places_are_not(monkeypatch, pair):
    agreement.settings(Config())
    agreement.settings(
        Config(out_dir="elsewhere", data_dir="copy", device="cuda:1", init_from=None)
    )
    with monkeypatch.context() as patch, pytest.raises(UserError, match="rank 1 .* model.py=000"):
        patch.setattr(source, "BEGAN", source.BEGAN | {"model.py": "0" * 64})
        agreement.settings(Config())
    pair.clear()
    agreement.settings(Config())
    monkeypatch.setattr(agreement.torch, "__version__", "1.0")
    with pytest.raises(UserError, match="torch=1.0 instead of 2."):
        agreement.settings(Config())
