"""Batches by number: the same ones again, from files and drawn; images that cannot be read."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from examples.resnet_spatial import resolve, shapes
from examples.resnet_spatial.config import TrainConfig
from examples.resnet_spatial.data import DataError, Fake, Folder, Shapes, Source


def open_folder(path: Path, *, skips: bool = False, size: int = 32) -> Folder:
    return Folder(str(path), size, workers=2, skips_unreadable=skips)


def check_batches(source: Source, size: int) -> None:
    """Batches have the right form, depend on their number and the seed, and come again."""
    images, labels = source.train(0, 6, 1)
    assert images.shape == (6, 3, size, size) and images.dtype == torch.float32
    assert labels.shape == (6,) and labels.dtype == torch.int64
    assert int(labels.min()) >= 0 and int(labels.max()) < len(source.class_names)
    again = source.train(0, 6, 1)
    assert torch.equal(images, again[0]) and torch.equal(labels, again[1])
    others = [source.train(1, 6, 1), source.train(0, 6, 2), source.evaluation(0, 6)]
    assert not any(torch.equal(images, other) for other, _ in others)


@pytest.mark.parametrize("source", [Fake(20, 7), Shapes(20)], ids=["fake", "shapes"])
def test_synthetic_batches(source: Source) -> None:
    check_batches(source, 20)


def test_batches_of_files(folder: Callable[..., Path]) -> None:
    source = open_folder(folder())
    check_batches(source, 32)
    assert source.class_names == tuple(sorted(shapes.KINDS))
    assert "22 images for training and 2 for evaluation" in source.summary
    assert open_folder(folder("other", per_class=4)).identity != source.identity


def test_an_epoch_has_each_image_once(folder: Callable[..., Path]) -> None:
    source = open_folder(folder())
    labels = torch.cat([source.train(i, 2, 0)[1] for i in range(11)])
    counts = labels.bincount(minlength=8).tolist()
    assert sum(counts) == 22 and set(counts) <= {2, 3}
    following = torch.cat([source.train(i, 2, 0)[1] for i in range(11, 22)])
    assert following.bincount(minlength=8).tolist() == counts
    assert not torch.equal(following, labels)


def test_images_apart_for_evaluation(folder: Callable[..., Path]) -> None:
    folder("set/train")
    root = folder("set/val", per_class=1).parent
    source = open_folder(root)
    assert "24 images for training and 8 for evaluation" in source.summary
    assert source.evaluation(0, 8)[1].tolist() == list(range(8))
    folder("odd/train")
    (folder("odd/val") / "another").mkdir()
    with pytest.raises(DataError, match="another"):
        open_folder(root.parent / "odd")


def test_a_run_goes_on_at_its_place() -> None:
    source = Shapes(16)
    config = TrainConfig(batch=4, steps=5, seed=0)
    whole, (batches, _) = list(resolve.batches(source, config)[0]), resolve.batches(source, config)
    batches.load_state_dict({"samples": 12})
    rest = list(batches)
    assert len(whole) == 5 and len(rest) == 2
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(whole[3:], rest))


def test_shapes_differ_by_kind_and_have_unit_scale() -> None:
    images, kinds = shapes.draw(256, 32, torch.Generator().manual_seed(0))
    assert set(kinds.tolist()) == set(range(len(shapes.KINDS)))
    assert abs(float(images.mean())) < 0.2 and 0.5 < float(images.std()) < 1.5


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()])
def test_a_folder_without_images(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "none"
    make(path)
    message = f"--data takes fake, shapes, or a folder that has a folder with images for each class; got {str(path)!r}"  # noqa: E501
    with pytest.raises(DataError, match=re.escape(message)):
        open_folder(path)
    (path / "cats").mkdir(parents=True)
    with pytest.raises(DataError, match="Found no valid file for the classes cats"):
        open_folder(path)


@pytest.mark.parametrize("damage", ["truncated", "unreadable"])
def test_an_image_that_cannot_be_read_is_named(damage: str, folder: Callable[..., Path]) -> None:
    root = folder()
    bad = root / "disc" / "1.png"
    content = bad.read_bytes()
    bad.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"no image")
    with pytest.raises(DataError, match=re.escape(f"{bad} is not")) as caught:
        [open_folder(root).train(i, 11, 0) for i in range(2)]
    assert "pass --skip-unreadable" in str(caught.value)
    images, _ = open_folder(root, skips=True).train(0, 22, 0)
    assert images.isfinite().all()


def test_no_image_can_be_read(folder: Callable[..., Path]) -> None:
    root = folder()
    for path in root.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="none of 24 is"):
        open_folder(root, skips=True).train(0, 2, 0)
