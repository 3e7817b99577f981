"""Batches of images by their number, so that a run goes on at any place: synthetic or from files.

Legend: N images, S rows and columns.
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from PIL import UnidentifiedImageError
from torchvision import datasets
from torchvision.transforms import v2

from examples.resnet_spatial import shapes
from examples.training.knobs import UsageError

# Of ImageNet's images, which all of torchvision's weights were trained with.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NUM_FAKE = 4  # batches, which repeat
# If a folder has no images for evaluation, one of so many is kept from training.
HELD_OUT = 20
_TRAINED, _EVALUATED = 0, 1  # parts of the data that share no random number

Batch = tuple[torch.Tensor, torch.Tensor]


class DataError(UsageError):
    """A folder has no images, or an image cannot be read."""


class Source(Protocol):
    """Where images come from.

    Attributes:
        summary: for the log.
        identity: of the data; a run goes on with the same.
        class_names: in the order of the labels.
    """

    summary: str
    identity: str
    class_names: tuple[str, ...]

    def train(self, index: int, batch: int, seed: int) -> Batch:
        """The training batch of that number: float32 (N, 3, S, S), and int64 labels (N,)."""
        ...

    def evaluation(self, index: int, batch: int) -> Batch:
        """As `train`, from images that are kept for evaluation."""
        ...


def _generator(*numbers: int) -> torch.Generator:
    """A generator whose stream depends on all the numbers."""
    text = ",".join(map(str, numbers)).encode()
    state = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    return torch.Generator().manual_seed(state)


# --- Synthetic ------------------------------------------------------------------------------------


class Fake:
    """Random numbers with random labels: for measurements; there is nothing to learn."""

    def __init__(self, size: int, num_classes: int) -> None:
        self.summary = f"random numbers of {size} x {size}, {num_classes} classes"
        self.identity = f"fake {size} {num_classes}"
        self.class_names = tuple(map(str, range(num_classes)))
        self._size = size
        self._made: dict[tuple[int, int, int], Batch] = {}

    def train(self, index: int, batch: int, seed: int) -> Batch:
        key = (index % NUM_FAKE, batch, seed)
        if key not in self._made:
            generator = _generator(_TRAINED, *key)
            images = torch.randn(batch, 3, self._size, self._size, generator=generator)
            labels = torch.randint(len(self.class_names), (batch,), generator=generator)
            self._made[key] = images, labels
        return self._made[key]

    def evaluation(self, index: int, batch: int) -> Batch:
        return self.train(index, batch, seed=-1)


class Shapes:
    """Shapes drawn on the fly: see shapes.py."""

    def __init__(self, size: int) -> None:
        self.summary = f"shapes of {size} x {size}: {', '.join(shapes.KINDS)}"
        self.identity = f"shapes {size}"
        self.class_names: tuple[str, ...] = shapes.KINDS
        self._size = size

    def train(self, index: int, batch: int, seed: int) -> Batch:
        return shapes.draw(batch, self._size, _generator(_TRAINED, seed, index))

    def evaluation(self, index: int, batch: int) -> Batch:
        return shapes.draw(batch, self._size, _generator(_EVALUATED, index))


# --- Files ----------------------------------------------------------------------------------------


class Folder:
    """Images in a folder for each class, by `torchvision.datasets.ImageFolder`.

    The root has these folders itself, or in `train` and `val`, as ImageNet has. For training, a
    random part of an image is cut out and may be flipped; for evaluation, the middle is cut out.

    Args:
        root: the folder.
        size: rows and columns of a batch's images.
        workers: threads that read files.
        skips_unreadable: whether another image takes the place of one that cannot be read.

    Raises:
        DataError: there is no such folder, or it has no images.
    """

    def __init__(self, root: str, size: int, *, workers: int, skips_unreadable: bool) -> None:
        path = Path(root).expanduser()
        apart = [path / name for name in ("train", "val")]
        if all(part.is_dir() for part in apart):
            self._trained, self._evaluated = map(_listed, apart)
            if self._trained.classes != self._evaluated.classes:
                raise DataError(
                    f"train and val must have the same classes; got {self._trained.classes[:5]} "
                    f"and {self._evaluated.classes[:5]} in {root!r}. Give both one folder for "
                    "each class."
                )
            places: list[Sequence[int]] = [range(len(self._trained)), range(len(self._evaluated))]
        else:
            self._trained = self._evaluated = _listed(path)
            every = range(len(self._trained))
            places = [[i for i in every if i % HELD_OUT or len(every) <= i + 1], every[::HELD_OUT]]
        self._places = [list(part) for part in places]
        self.class_names = tuple(self._trained.classes)
        num_trained, num_evaluated = map(len, self._places)
        self.summary = (
            f"{num_trained:,} images for training and {num_evaluated:,} for evaluation in {path}, "
            f"{len(self.class_names):,} classes"
        )
        names = [str(Path(name).relative_to(path)) for name, _ in self._trained.samples]
        self.identity = hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()
        self._size, self._skips = size, skips_unreadable
        self._pool = ThreadPoolExecutor(max(workers, 1), thread_name_prefix="images")
        self._to_tensor = v2.Compose(
            [
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, DEVIATION),
                v2.ToPureTensor(),
            ]
        )
        self._middle = v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size)])

    def train(self, index: int, batch: int, seed: int) -> Batch:
        places, found = self._places[0], []
        for number in range(index * batch, (index + 1) * batch):
            epoch, position = divmod(number, len(places))
            found.append((places[self._order(epoch, seed)[position]], epoch, seed))
        return self._batch(lambda item: self._trained_image(*item), found)

    def evaluation(self, index: int, batch: int) -> Batch:
        places = self._places[1]
        numbers = range(index * batch, (index + 1) * batch)
        found = [(places[number % len(places)],) for number in numbers]
        return self._batch(lambda item: self._evaluated_image(*item), found)

    def _order(self, epoch: int, seed: int) -> torch.Tensor:
        """The order of the images in one pass over them."""
        if getattr(self, "_ordered", None) != (epoch, seed):
            generator = _generator(_TRAINED, seed, epoch)
            self._current = torch.randperm(len(self._places[0]), generator=generator)
            self._ordered = (epoch, seed)
        return self._current

    def _batch(self, load: Callable[..., Batch], items: Sequence[tuple[int, ...]]) -> Batch:
        images, labels = zip(*self._pool.map(load, items))
        return torch.stack(images), torch.stack(labels)

    def _trained_image(self, place: int, epoch: int, seed: int) -> Batch:
        image, label = self._read(self._trained, place)
        generator = _generator(_TRAINED, seed, epoch, place)
        return self._to_tensor(_random_part(image, self._size, generator)), label

    def _evaluated_image(self, place: int) -> Batch:
        image, label = self._read(self._evaluated, place)
        return self._to_tensor(self._middle(image)), label

    def _read(self, images: datasets.ImageFolder, place: int) -> tuple[object, torch.Tensor]:
        """The image at that place, or the next that can be read, and its label."""
        for at in range(place, place + len(images)):
            path, label = images.samples[at % len(images)]
            try:
                return images.loader(path), torch.tensor(label)
            # PIL raises an OSError for a truncated file, and SyntaxError for some broken ones.
            except (OSError, SyntaxError, UnidentifiedImageError, ValueError) as error:
                if not self._skips:
                    raise DataError(
                        f"every image must be readable; {path} is not: {error}. Replace or remove "
                        "it, or pass --skip-unreadable, which takes the next image instead."
                    ) from error
        raise DataError(
            f"at least one image must be readable; none of {len(images):,} is. Look at the first: "
            f"{images.samples[0][0]}."
        )


def _listed(path: Path) -> datasets.ImageFolder:
    """The images of a folder that has one folder for each class."""
    try:
        return datasets.ImageFolder(str(path))
    except FileNotFoundError as error:
        raise DataError(
            f"--data takes fake, shapes, or a folder that has a folder with images for each "
            f"class; got {str(path)!r}: {error}."
        ) from error


def _random_part(image: object, size: int, generator: torch.Generator) -> object:
    """A random part of 8 to 100% of the image's area, of size x size; flipped half of the time.

    v2.RandomResizedCrop draws from torch's global generator, which the threads that read images
    share with the training loop; here an image depends on nothing but its own generator.
    """
    height, width = v2.functional.get_size(image)
    for _ in range(10):
        share, shape, top, left = torch.rand(4, generator=generator).tolist()
        area = height * width * (0.08 + 0.92 * share)
        ratio = (3 / 4) ** (1 - 2 * shape)
        rows, columns = round((area / ratio) ** 0.5), round((area * ratio) ** 0.5)
        if 0 < rows <= height and 0 < columns <= width:
            break
    else:
        rows = columns = min(height, width)
        top = left = 0.5
    corner = int(top * (height - rows + 1)), int(left * (width - columns + 1))
    part = v2.functional.resized_crop(image, *corner, rows, columns, [size, size])
    flips = torch.rand((), generator=generator) < 0.5
    return v2.functional.horizontal_flip(part) if flips else part
