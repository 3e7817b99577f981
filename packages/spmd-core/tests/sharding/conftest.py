"""The global mesh, taken away for a test."""

import pytest

from spmd_core.sharding.mesh import get_global_mesh, set_global_mesh


@pytest.fixture
def no_global_mesh():
    """None is set; afterwards the earlier one is."""
    before = get_global_mesh()
    set_global_mesh(None)
    yield
    set_global_mesh(before)
