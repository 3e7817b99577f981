"""Each test of torch.compile traces anew."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_traced() -> Iterator[None]:
    yield
    torch._dynamo.reset()
