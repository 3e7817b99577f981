"""A two-tower recommender: users and items as sums of large tables' rows, then MLPs.

Each row of a batch is a user with an item that they chose; the other items of the batch are the
wrong answers (sampled softmax, as by Yi et al., 2019).

Legend: N rows, K features of a side, D width of a row of a table.
"""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.auto_models.manual import by_rules
from benchmarks.auto_models.model import Built, Model, adamw, train_step
from examples.gpt2.presets import BATCH_AXES
from examples.gpt2.shardings import Spec


@dataclass(frozen=True)
class Size:
    """Sizes of both towers: rows of each table, width of a row, layers of an MLP, batch."""

    num_users: int
    num_items: int
    num_values: int
    num_features: int
    width: int
    layers: tuple[int, ...]
    batch: int


SIZES = {
    "tiny": Size(256, 128, 32, 3, 16, (32, 16), 16),
    "small": Size(40_000, 20_000, 1000, 4, 64, (512, 256), 512),
    "5B": Size(50_000_000, 25_000_000, 1_000_000, 8, 64, (1024, 512, 256), 8192),
}


class Tower(nn.Module):
    """Unit vectors (N, width of the last layer) of ids (N,) and categories (N, K)."""

    def __init__(self, num_rows: int, size: Size) -> None:
        super().__init__()
        self.ids = nn.Embedding(num_rows, size.width)
        self.values = nn.Embedding(size.num_values, size.width)
        widths = (size.width * (1 + size.num_features), *size.layers)
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
        self.layers = nn.ModuleList(layers)

    def forward(self, ids_N: Tensor, values_NK: Tensor) -> Tensor:
        x = torch.cat((self.ids(ids_N), self.values(values_NK).flatten(1)), 1)
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return F.normalize(self.layers[-1](x), dim=-1)


class TwoTowers(nn.Module):
    """Scores (N, N) of each user with each item of a batch."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.users, self.items = Tower(size.num_users, size), Tower(size.num_items, size)

    def forward(self, users: Tensor, of_users: Tensor, items: Tensor, of_items: Tensor) -> Tensor:
        return self.users(users, of_users) @ self.items(items, of_items).mT


def batch_loss(model: nn.Module, *inputs: Tensor) -> Tensor:
    """Mean cross entropy of each user's own item among all of the batch."""
    scores_NN = model(*inputs).float() / 0.1
    return F.cross_entropy(scores_NN, torch.arange(len(scores_NN), device=scores_NN.device))


def build(name: str, device: str | torch.device) -> Built:
    """See `benchmarks.auto_models`.

    The inputs are users (N,), their categories (N, K), items (N,) and their categories (N, K).
    """
    size = SIZES[name]
    with torch.device(device):
        model = TwoTowers(size)
        categories = [torch.randint(size.num_values, (size.batch, size.num_features)) for _ in "ab"]
        users = torch.randint(size.num_users, (size.batch,))
        items = torch.randint(size.num_items, (size.batch,))
    optimizer = adamw(model, lr=1e-3)
    step = train_step(model, optimizer, batch_loss, is_bf16=name not in ("tiny", "small"))
    return model, optimizer, step, (users, categories[0], items, categories[1])


# The tables are nearly all of the memory: all axes split their rows, and lookups move rows of the
# batch rather than of a table. The layers are column and row parallel in turns.
PARAMETERS: dict[str, Spec] = {
    r".*\.(ids|values)\.weight": (("tensor", "fsdp"), None),
    r".*\.layers\.[02]\.weight": ("tensor", "fsdp"),
    r".*\.layers\.[02]\.bias": ("tensor",),
    r".*\.layers\.1\.weight": ("fsdp", "tensor"),
    r".*\.layers\.1\.bias": (None,),
}
OUTPUTS: dict[str, Spec] = {r"users|items": (BATCH_AXES, None)}
MODEL = Model("two_tower", tuple(SIZES), build, by_rules(PARAMETERS, OUTPUTS))
