"""Images from every source, splits that are what they say, and one clear error for what cannot be used."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rosu_llm.errors import ConfigError, DataError
from rosu_llm.vision.batches import (
    ImageCollator,
    ImagePairs,
    PlainImages,
    batch_ratio,
    channel_statistics,
    shifted_and_flipped,
)
from rosu_llm.vision.images import Images, checked, load_images
from rosu_llm.vision.splits import make_split
from tests.vision.small import MEAN, STD, images


def test_real_cifar_is_read_and_split_into_disjoint_stratified_parts(shared_data: Path) -> None:
    train, test = load_images(str(shared_data / "cifar10"))
    assert train.pixels.shape == (6000, 3, 32, 32) and len(test) == 1500 and len(train.classes) == 10
    raw = np.load(next((shared_data / "cifar10").glob("*train*.npz")))
    assert np.array_equal(train.pixels[17].permute(1, 2, 0).numpy(), raw["images"][17])
    split = make_split(train, test, protocol="random", seed=3, validation_share=0.05)
    parts = [split.forget, split.retain, split.validation]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(6000))
    assert torch.bincount(train.labels[split.forget]).tolist() == [57] * 10  # 10 % of 570
    assert torch.bincount(train.labels[split.validation]).tolist() == [30] * 10
    again = make_split(train, test, protocol="random", seed=3, validation_share=0.05)
    other = make_split(train, test, protocol="random", seed=4, validation_share=0.05)
    assert torch.equal(split.forget, again.forget) and not torch.equal(split.forget, other.forget)
    assert torch.equal(split.validation, other.validation)  # whoever trains on the rest may be shared
    single = make_split(train, test, protocol="classwise", seed=7)
    assert single.forgotten_class == 7 and set(train.labels[single.forget].tolist()) == {7}
    assert len(single.forget) == 600 and len(single.test) == 1350
    assert len(make_split(train, test, protocol="classwise", seed=7, test_forgotten_class=True).test) == 1500
    mean, std = channel_statistics(train.pixels)
    values = train.pixels.double() / 255.0
    assert mean == pytest.approx(values.mean((0, 2, 3)).tolist(), rel=1e-9)
    assert std == pytest.approx(values.std((0, 2, 3), correction=0).tolist(), rel=1e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"protocol": "classwise", "seed": 0, "forget_class": 4},
            r"forget_class=4 does not exist: there are 4 classes",
        ),
        ({"protocol": "classwise", "seed": 0, "forget_class": -1}, "forget_class=-1 does not exist"),
        ({"protocol": "random", "seed": 0, "forget_class": 77}, "forget_class=77 does not exist"),
        ({"protocol": "classwise", "seed": 4}, r"seed 4 is a class .* there are 4 classes, 0 \(a\) to 3 \(d\)"),
        ({"protocol": "random", "seed": 0, "forget_share": 0.0}, "leaves nothing to forget"),
        ({"protocol": "random", "seed": 0, "forget_share": 0.01}, "forget split is empty"),
        ({"protocol": "randm", "seed": 0}, "Did you mean 'random'"),
    ],
)
def test_splits_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, DataError), match=words):
        make_split(images(), images(), **options)


@pytest.mark.parametrize(
    ("pixels", "labels", "classes", "words"),
    [
        (np.zeros((4, 6, 6, 3), np.uint8), [0, 1, 2, 5], ["a", "b", "c"], r"labels go from 0 to 5, and there are 3"),
        (np.zeros((4, 6, 6, 3), np.uint8), [0, -1, 2, 1], None, "labels go from -1"),
        (np.zeros((4, 6, 6, 3), np.float32), [0, 1, 2, 1], None, "uint8"),
        (np.zeros((4, 6, 6, 3), np.uint8), [0, 1], None, "as many whole numbers"),
        (np.zeros((2, 6, 6, 3), np.uint8), ["cat", "dog"], None, "whole numbers as labels, not <U3"),
        (np.array([["a"]]), [0], None, "images are <U1"),
        (np.zeros((0, 6, 6, 3), np.uint8), np.zeros(0, np.int64), None, "holds no image"),
    ],
)
def test_arrays_that_are_no_images(pixels: Any, labels: Any, classes: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        checked(pixels, labels, classes, "x.npz")


def write_folder(folder: Path, sizes: dict[str, tuple[int, int]]) -> Path:
    from PIL import Image

    for name, (width, height) in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((height, width, 3), len(name), np.uint8)).save(path)
    return folder


def test_class_folders_and_mixed_sizes(tmp_path: Path) -> None:
    same = dict.fromkeys(["train/cat/1.png", "train/dog/2.png", "test/cat/3.png", "test/dog/4.png"], (5, 4))
    train, test = load_images(str(write_folder(tmp_path / "good", same)))
    assert train.classes == ("cat", "dog") and train.labels.tolist() == [0, 1]
    assert train.pixels.shape == (2, 3, 4, 5) and len(test) == 2
    mixed = {**same, "train/dog/9.png": (6, 4)}
    with pytest.raises(DataError, match=r"9\.png is 6×4, and 1\.png 5×4: images of one size"):
        load_images(str(write_folder(tmp_path / "mixed", mixed)))


def test_torchvisions_cifar_is_read_without_running_what_a_pickle_asks_for(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rows = np.arange(3 * 3072, dtype=np.uint8).reshape(3, 3072)
    batch = {b"data": rows, b"labels": [0, 1, 0]}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"cat", b"dog"]}, protocol=2))
    train, test = load_images(str(tmp_path))
    assert len(train) == 15 and train.classes == ("cat", "dog")
    assert torch.equal(test.pixels[1], torch.from_numpy(rows[1].reshape(3, 32, 32)))

    for broken, words in (
        ({b"labels": [0, 1, 0]}, "test_batch has no 'data'"),
        ([1, 2], "test_batch has no 'data'"),
        ({b"data": rows[:, :9], b"labels": [0, 1, 0]}, r"shape \(3, 9\); \[N, 3072\]"),
    ):
        (folder / "test_batch").write_bytes(pickle.dumps(broken, protocol=2))
        with pytest.raises(DataError, match=words):
            load_images(str(tmp_path))
    (folder / "test_batch").write_bytes(pickle.dumps(batch, protocol=2)[:40])
    with pytest.raises(DataError, match="test_batch cannot be read"):
        load_images(str(tmp_path))

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.unlink, (folder / "test_batch",))

    (folder / "batches.meta").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DataError, match=r"pickle asks for pathlib"):
        load_images(str(tmp_path))
    assert (folder / "test_batch").is_file()


def test_the_hubs_columns_become_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the download."""
    import datasets

    raw = images(6, side=5)
    rows = {"image": [pixels.permute(1, 2, 0).numpy() for pixels in raw.pixels], "label": raw.labels.tolist()}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("abcd"))})
    made = datasets.Dataset.from_dict(rows, features=features)
    asked: list[str] = []

    def give(name: str) -> Any:
        asked.append(name)
        return datasets.DatasetDict({"train": made, "valid": made})

    monkeypatch.setattr(datasets, "load_dataset", give)
    train, test = load_images("tiny-imagenet")
    assert asked == ["zh-plus/tiny-imagenet"] and train.classes == tuple("abcd")
    assert torch.equal(train.pixels, raw.pixels) and torch.equal(test.labels, raw.labels)
    with pytest.raises(DataError, match=r"columns \['image', 'label'\] but no 'img'"):
        load_images("cifar10")


def test_what_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no images that are understood"):
        load_images(str(tmp_path))
    np.savez(tmp_path / "one.npz", images=np.zeros((2, 4, 4, 3), np.uint8), labels=np.array([0, 1]))
    with pytest.raises(ConfigError, match="is one file: give test_data"):
        load_images(str(tmp_path / "one.npz"))
    train, _ = load_images(str(tmp_path / "one.npz"), str(tmp_path / "one.npz"))
    assert train.classes == ("0", "1")
    np.savez(tmp_path / "bad.npz", images=np.zeros((2, 5, 5, 3), np.uint8), labels=np.array([0, 1]))
    with pytest.raises(DataError, match="resize them to one size"):
        load_images(str(tmp_path / "one.npz"), str(tmp_path / "bad.npz"))
    whole = (tmp_path / "one.npz").read_bytes()
    for content in (whole[: len(whole) // 2], b""):
        (tmp_path / "cut.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"cut\.npz cannot be read .* Is the file complete"):
            load_images(str(tmp_path / "one.npz"), str(tmp_path / "cut.npz"))
    with (tmp_path / "single.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="is one array"):
        load_images(str(tmp_path / "one.npz"), str(tmp_path / "single.npz"))


def test_crops_and_flips_are_those_of_a_naive_loop() -> None:
    """Every augmented image is one of the 81 × 2 that padding, cutting and mirroring by hand give; all places occur."""
    pixels = images(1).pixels
    padded = torch.zeros(3, 14, 14, dtype=torch.uint8)
    padded[:, 4:10, 4:10] = pixels[0]
    every = {}
    for down in range(9):
        for right in range(9):
            cut = padded[:, down : down + 6, right : right + 6]
            every[cut.numpy().tobytes()] = (down, right, 0)
            every[cut.flip(-1).contiguous().numpy().tobytes()] = (down, right, 1)
    found = shifted_and_flipped(pixels.expand(4000, -1, -1, -1), list(range(4000)))
    places = [every[image.numpy().tobytes()] for image in found]
    assert len(set(places)) == 162
    assert torch.equal(shifted_and_flipped(pixels, [None]), pixels)
    assert torch.equal(shifted_and_flipped(pixels, [5]), shifted_and_flipped(pixels, [5]))


def test_pairs_cover_all_retain_images_once_an_epoch_and_forget_images_evenly() -> None:
    rows = torch.arange(40)
    pairs = ImagePairs(rows[:8], rows[8:], forget_each=1, retain_each=2, seed=5)
    for epoch in range(2):
        pairs.set_epoch(epoch)
        items = [pairs[i] for i in range(len(pairs))]
        assert sorted(row for item in items for row, _ in item["retain"]) == list(range(8, 40))
        assert sorted(row for item in items for row, _ in item["forget"]) == sorted([*range(8)] * 2)
    pairs.set_epoch(0)
    first = pairs[0]
    pairs.set_epoch(1)
    assert first != pairs[0]  # another deck and another augmentation
    pairs.set_epoch(0)
    assert first == pairs[0]
    beside = [pairs[i] for i in range(len(pairs))]
    numbers = [{number for item in beside for _, number in item[part]} for part in ("forget", "retain")]
    assert not numbers[0] & numbers[1]  # images beside each other are not cropped and flipped alike
    assert batch_ratio(128, 512) == (128, 1, 4) and batch_ratio(128, 64) == (64, 2, 1)
    with pytest.raises(ConfigError, match="multiple of the other"):
        batch_ratio(128, 96)
    with pytest.raises(DataError, match="forget split is empty"):
        ImagePairs(rows[:0], rows)


def test_batches_are_normalised_and_joint_ones_carry_the_other_part() -> None:
    data = images()
    batch = ImageCollator(data, MEAN, STD)([PlainImages(torch.tensor([3, 9]))[1]])
    by_hand = (data.pixels[9].float() / 255.0 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    assert torch.allclose(batch["pixel_values"][0], by_hand) and batch["labels"].tolist() == [1]
    item = {"forget": [(1, None)], "retain": [(2, None), (3, None)]}
    joint = ImageCollator(data, MEAN, STD, joint=True)([item])
    assert torch.equal(joint["forget"]["beside"], joint["retain"]["pixel_values"])
    assert torch.equal(joint["retain"]["beside"], joint["forget"]["pixel_values"])


def test_taking_rows_keeps_classes() -> None:
    data = images()
    assert isinstance(data.take(torch.tensor([1])), Images) and data.take(torch.tensor([1])).classes == data.classes
