"""Image classification data in memory, from an npz file, a folder, torchvision's folders, or the hub.

Images are kept as bytes, [N, 3, H, W] in uint8: CIFAR-10 takes 180 MB, Tiny-ImageNet 1.4 GB. Nothing is executed on
reading: npz without pickled objects, and CIFAR's own pickles by a reader that knows arrays and nothing else.
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, DataError, RosuError, one_line

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
#: Short names → data sets of the hub, with the columns of image and label.
HUB = {
    "cifar10": ("uoft-cs/cifar10", "img", "label"),
    "cifar100": ("uoft-cs/cifar100", "img", "fine_label"),
    "tiny-imagenet": ("zh-plus/tiny-imagenet", "image", "label"),
}
_HUB_TESTS = ("test", "valid", "validation")


@dataclass(frozen=True)
class Images:
    """Images with one label each.

    Attributes:
        pixels: uint8, [N, 3, H, W].
        labels: int64, [N], from 0 on.
        classes: names, in the order of the labels.
    """

    pixels: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> Images:
        """Some of them."""
        return Images(self.pixels[rows], self.labels[rows], self.classes)

    @property
    def side(self) -> int:
        """The smaller of height and width."""
        return min(self.pixels.shape[-2:])


def load_images(source: str, test_source: str | None = None) -> tuple[Images, Images]:
    """Training and test images.

    Args:
        source: a folder with ``*train*.npz`` and ``*test*.npz``, with ``train/CLASS/*.png`` and ``test/CLASS/*.png``
            (or ``val``), or as torchvision leaves CIFAR; one npz file; or ``cifar10``, ``cifar100``, ``tiny-imagenet``
            or any ``owner/name`` of the hub.
        test_source: the test images where they lie elsewhere: an npz file, or a folder of class folders.
    """
    path = Path(source).expanduser()
    if test_source is not None:
        train, test = _one(path, "data"), _one(Path(test_source).expanduser(), "test_data")
    elif path.is_dir():
        train, test = _folder(path)
    elif path.is_file():
        raise ConfigError(f"data={source!r} is one file: give test_data=FILE beside it, or the folder that has both.")
    else:
        train, test = _hub(source)
    return _agreed(train, test, source)


def _agreed(train: Images, test: Images, source: str) -> tuple[Images, Images]:
    if train.pixels.shape[1:] != test.pixels.shape[1:]:
        raise DataError(
            f"{source}: training images are {tuple(train.pixels.shape[1:])}, test images "
            f"{tuple(test.pixels.shape[1:])}: resize them to one size first."
        )
    if train.classes != test.classes:
        raise DataError(
            f"{source}: training and test images have different classes ({len(train.classes)} and "
            f"{len(test.classes)}): give the same ones, in the same order."
        )
    return train, test


def checked(pixels: Any, labels: Any, classes: Sequence[str] | None, source: object) -> Images:
    """Images from arrays, [N, H, W, 3] or [N, 3, H, W], or one clear error."""
    pixels, labels = np.asarray(pixels), np.asarray(labels)
    if pixels.ndim != 4 or pixels.dtype != np.uint8 or 3 not in (pixels.shape[1], pixels.shape[-1]):
        raise DataError(f"{source}: images are {pixels.dtype} of shape {pixels.shape}; uint8, [N, H, W, 3] is needed.")
    pixels = torch.as_tensor(pixels)
    if pixels.shape[-1] == 3:
        pixels = pixels.permute(0, 3, 1, 2)
    if labels.shape != (len(pixels),) or labels.dtype.kind not in "iu":
        raise DataError(
            f"{source}: {len(pixels)} images need as many whole numbers as labels, not {labels.dtype} of shape "
            f"{labels.shape}; names go into 'classes'."
        )
    if len(pixels) == 0:
        raise DataError(f"{source} holds no image.")
    labels = torch.as_tensor(labels.astype(np.int64))
    low, high = int(labels.min()), int(labels.max())
    names = tuple(map(str, classes)) if classes is not None else tuple(str(i) for i in range(high + 1))
    if low < 0 or high >= len(names):
        raise DataError(
            f"{source}: labels go from {low} to {high}, and there are {len(names)} classes: they must be numbered from "
            f"0 to {len(names) - 1}."
        )
    return Images(pixels.contiguous(), labels, names)


def _one(path: Path, setting: str) -> Images:
    if path.is_dir():
        return _class_folders(path)
    if path.suffix == ".npz" and path.is_file():
        return _npz(path)
    raise ConfigError(f"{setting}={str(path)!r} is neither an npz file nor a folder of class folders.")


def _npz(path: Path) -> Images:
    try:
        found = np.load(path, allow_pickle=False)
        if not isinstance(found, np.lib.npyio.NpzFile):
            raise DataError(f"{path} is one array: write images and labels with np.savez.")
        with found:
            arrays = {name: found[name] for name in found.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, RosuError):
            raise
        raise DataError(
            f"{path} cannot be read as npz without pickled objects: {one_line(error)} Is the file complete?"
        ) from error
    for name in ("images", "labels"):
        if name not in arrays:
            raise DataError(f"{path} has the arrays {sorted(arrays)} but no {name!r}.")
    return checked(arrays["images"], arrays["labels"], _names(arrays.get("classes")), path)


def _names(found: Any) -> list[str] | None:
    return None if found is None else [x.decode() if isinstance(x, bytes) else str(x) for x in found.tolist()]


def _folder(path: Path) -> tuple[Images, Images]:
    npz = {part: sorted(path.glob(f"*{part}*.npz")) for part in ("train", "test")}
    if all(len(files) == 1 for files in npz.values()):
        train, test = (_npz(files[0]) for files in npz.values())
        return train, test
    for name, reader in (("cifar-10-batches-py", _cifar10), ("cifar-100-python", _cifar100)):
        for folder in (path, path / name):
            if folder.name == name and folder.is_dir():
                return reader(folder)
    tests = [path / name for name in ("test", "val") if (path / name).is_dir()]
    if (path / "train").is_dir() and tests:
        train = _class_folders(path / "train")
        notes = path / "val" / "val_annotations.txt"
        return train, _tiny_test(notes, train.classes) if notes.is_file() else _class_folders(tests[0], train.classes)
    raise DataError(
        f"{path} holds no images that are understood: one *train*.npz and one *test*.npz, train/CLASS and test/CLASS "
        "(or val/CLASS) folders, or torchvision's cifar-10-batches-py or cifar-100-python."
    )


def _class_folders(path: Path, classes: Sequence[str] | None = None) -> Images:
    """One folder per class, images in it or below."""
    names = sorted(folder.name for folder in path.iterdir() if folder.is_dir()) if classes is None else list(classes)
    files, labels = [], []
    for label, name in enumerate(names):
        own = sorted(file for file in (path / name).rglob("*") if file.suffix.lower() in SUFFIXES)
        files += own
        labels += [label] * len(own)
    if not files:
        raise DataError(f"{path} has no class folder with images ({', '.join(SUFFIXES)}).")
    return checked(_read(files), labels, names, path)


def _tiny_test(notes: Path, classes: Sequence[str]) -> Images:
    """Tiny-ImageNet's validation images: one folder, and a table of their classes."""
    number = {name: label for label, name in enumerate(classes)}
    rows = [line.split("\t")[:2] for line in notes.read_text(encoding="utf-8").splitlines() if line.strip()]
    for _, name in rows:
        if name not in number:
            raise DataError(f"{notes} names the class {name!r}, which has no folder of training images.")
    pixels = _read([notes.parent / "images" / file for file, _ in rows])
    return checked(pixels, [number[name] for _, name in rows], classes, notes)


def _read(files: Sequence[Path]) -> Any:
    from PIL import Image

    first: tuple[int, ...] | None = None
    pixels = []
    for file in files:
        try:
            with Image.open(file) as image:
                found = np.asarray(image.convert("RGB"))
        except OSError as error:
            raise DataError(f"{file} cannot be read as an image: {error}.") from error
        first = first or found.shape
        if found.shape != first:
            raise DataError(
                f"{file} is {found.shape[1]}×{found.shape[0]}, and {files[0].name} {first[1]}×{first[0]}: images of "
                "one size are needed; resize them first."
            )
        pixels.append(found)
    return np.stack(pixels)


class _ArraysOnly(pickle.Unpickler):
    """Reads dictionaries, lists, numbers, text and numpy arrays; refuses anything else a pickle could call."""

    _KNOWN = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._KNOWN:
            raise DataError(f"The pickle asks for {module}.{name}, which no CIFAR file does: it was not read.")
        return super().find_class(module, name)


def _pickled(path: Path, *keys: bytes) -> list[Any]:
    """The entries ``keys`` of the dictionary in a file."""
    try:
        content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except RosuError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to say
        raise DataError(f"{path} cannot be read: {one_line(error) or type(error).__name__}") from error
    for key in keys:
        if not isinstance(content, Mapping) or key not in content:
            raise DataError(f"{path} has no {key.decode()!r}: it is no file of torchvision's CIFAR.")
    return [content[key] for key in keys]


def _cifar_pixels(found: Any, path: Path) -> Any:
    rows = np.asarray(found)
    if rows.ndim != 2 or rows.shape[1] != 3 * 32 * 32:
        raise DataError(f"{path}: data has the shape {rows.shape}; [N, 3072] is needed.")
    return rows.reshape(-1, 3, 32, 32)


def _cifar10(folder: Path) -> tuple[Images, Images]:
    names = _names(np.array(_pickled(folder / "batches.meta", b"label_names")[0]))

    def read(files: Sequence[str]) -> Images:
        parts = [_pickled(folder / file, b"data", b"labels") for file in files]
        pixels = [_cifar_pixels(data, folder / file) for file, (data, _) in zip(files, parts, strict=True)]
        return checked(np.concatenate(pixels), [label for _, own in parts for label in own], names, folder)

    return read([f"data_batch_{i}" for i in range(1, 6)]), read(["test_batch"])


def _cifar100(folder: Path) -> tuple[Images, Images]:
    names = _names(np.array(_pickled(folder / "meta", b"fine_label_names")[0]))

    def read(file: str) -> Images:
        data, labels = _pickled(folder / file, b"data", b"fine_labels")
        return checked(_cifar_pixels(data, folder / file), labels, names, folder)

    return read("train"), read("test")


def _hub(source: str) -> tuple[Images, Images]:
    from datasets import load_dataset

    name, image, label = HUB.get(source, (source, "image", "label"))
    try:
        found = load_dataset(name)
    except Exception as error:  # whatever the hub's client meets
        raise DataError(
            f"data={source!r} is no file or folder, and the hub did not give it ({type(error).__name__}: {error}). "
            f"Give a local path, or one of {', '.join(HUB)} or owner/name while online."
        ) from error
    test = next((part for part in _HUB_TESTS if part in found), None)
    if "train" not in found or test is None:
        raise DataError(f"{name} has the splits {sorted(found)}: 'train' and one of {_HUB_TESTS} are needed.")

    def read(part: Any) -> Images:
        missing = [column for column in (image, label) if column not in part.column_names]
        if missing:
            raise DataError(f"{name} has the columns {part.column_names} but no {missing[0]!r}.")
        pixels = [np.asarray(row.convert("RGB")) for row in part[image]]
        for own in pixels:
            if own.shape != pixels[0].shape:
                raise DataError(f"{name} has images of different sizes: resize them first.")
        return checked(np.stack(pixels), list(part[label]), getattr(part.features[label], "names", None), name)

    return read(found["train"]), read(found[test])
