"""Downloads from a server that plays the hub with its faults are whole, or one line says why."""

import json
import time

import pytest
from conftest import one_line
from hub import Hub
from safetensors.torch import save_file

import bench
import fineweb
import hellaswag
from corpus import DataError
from run import hf
from system.errors import UserError


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub whose answers nobody waits for."""
    import datasets
    from huggingface_hub import constants

    sleep = time.sleep
    with Hub(tmp_path / "hub") as server:
        monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        url = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
        # test.sh sets it for the other tests
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.url)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
        monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", tmp_path / "modules")
        yield server


def add(hub, path, data):
    path = hub.folder / path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def prepare(out, **settings):
    fineweb.main(fineweb.Config(out_dir=str(out), tokenizer="bytes", **settings))


@pytest.mark.parametrize("streaming", [False, True])
def test_texts_survive_faults(hub, tmp_path, streaming):
    lines = "".join(json.dumps({"text": f"document {i} " * 20}) + "\n" for i in range(500)).encode()
    local = add(hub, "datasets/me/texts/a.jsonl", lines)
    prepare(tmp_path / "local", dataset=str(local), val_tokens=1000)
    hub.faults = {"a.jsonl": ["drop", 429, 503, "short"], "api/datasets/me/texts": [503]}
    prepare(tmp_path / "hub", dataset="me/texts", val_tokens=1000, streaming=streaming)
    assert not any(hub.faults.values())
    train = [
        next((tmp_path / out).glob("*_train_000001.bin")).read_bytes() for out in ("local", "hub")
    ]
    assert train[0] == train[1]
    with pytest.raises(DataError, match="RepositoryNotFoundError|DatasetNotFoundError") as error:
        prepare(tmp_path / "none", dataset="me/other", val_tokens=1000, streaming=streaming)
    assert "run the same command" in one_line(error)


def test_weights_survive_faults(hub, tmp_path):
    import torch

    add(hub, "models/me/gpt/config.json", json.dumps({"model_type": "gpt2"}).encode())
    save_file({"w": torch.randn(64, 64)}, add(hub, "models/me/gpt/model.safetensors", b""))
    hub.faults = {"model.safetensors": ["drop", 503, 429, "short"], "revision/main": [503]}
    for name in ("pytorch_model.bin", "onnx/config.json", "tokenizer.json", "merges.txt"):
        add(hub, f"models/me/gpt/{name}", b"{}")
    folder = hf.fetch("me/gpt")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    expected = {"config.json", "model.safetensors", "tokenizer.json", "merges.txt"}
    assert names == expected  # no pickle, no other format
    assert not any(hub.faults.values())
    large = dict(model_type="gpt2", vocab_size=257, n_positions=64, n_layer=3, n_head=2, n_embd=32)
    add(
        hub,
        "models/me/large/config.json",
        json.dumps(large | {"layer_norm_epsilon": 1e-5}).encode(),
    )
    add(hub, "models/me/large/model.safetensors", b"never read")
    found = bench.with_shape({"init_from": "hf:me/large"})
    assert found["n_layer"] == 3 and not any(
        "me/large" in p and "safetensors" in p for _, p, _ in hub.asked
    )
    kept = hub.folder / "models/me/gpt/model.safetensors"
    assert (folder / "model.safetensors").read_bytes() == kept.read_bytes()
    with pytest.raises(
        UserError, match="me/other: no such folder, and it cannot be downloaded"
    ) as error:
        hf.fetch("me/other")
    one_line(error)


def test_hellaswag_comes_whole_or_not_at_all(hub, tmp_path):
    example = {"ctx": "A man", "endings": ["a", "b", "c", "d"], "label": 1}
    lines = (json.dumps(example) + "\n").encode() * 51  # half of it ends within a line
    add(hub, "datasets/me/h/hellaswag_val.jsonl", lines)
    url = f"{hub.url}/datasets/me/h/resolve/main/hellaswag_val.jsonl"
    for _ in range(2):  # from the network, and from the cache
        assert hellaswag.download(tmp_path / "whole", url).read_bytes() == lines
    assert len(hub.asked) == 1
    for i, fault in enumerate((429, 503, "drop", "short")):
        hub.faults = {"hellaswag_val.jsonl": [fault]}
        with pytest.raises(hellaswag.Unavailable, match="cannot be downloaded .*--file") as error:
            hellaswag.download(tmp_path / f"{i}", url)
        assert one_line(error) and not (tmp_path / f"{i}").exists()
