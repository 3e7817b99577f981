"""Determinants, whose sign is that of the row exchanges."""

import pytest
import torch

ORDERS = [[0, 1, 2, 3], [1, 0, 2, 3], [1, 2, 0, 3], [1, 2, 3, 0], [1, 0, 3, 2], [3, 2, 1, 0]]


@pytest.mark.parametrize("order", ORDERS)
def test_the_sign_of_a_determinant(order):
    matrix = torch.diag(torch.tensor([2.0, 3.0, 4.0, 5.0]))[order]
    x = matrix.to("xla")
    torch.testing.assert_close(torch.linalg.det(x).cpu(), torch.linalg.det(matrix))
    for got, expected in zip(torch.linalg.slogdet(x), torch.linalg.slogdet(matrix)):
        torch.testing.assert_close(got.cpu(), expected)
