"""docs/ops.md is what the registry, the results and the tests say now."""

import re

import pytest
import torch

from scripts import ops_page
from spmd_core.dispatch import router
from spmd_core.dispatch.router import How


def test_the_page_is_not_stale():
    text = ops_page.PAGE.read_text()
    version = re.search(r"It says of torch (\S+) what", text)[1]
    if version != torch.__version__.partition("+")[0]:
        pytest.skip(
            f"the page is of torch {version}, which has other overloads than {torch.__version__}"
        )
    assert text == ops_page.page(), (
        "docs/ops.md is stale. Run python -m scripts.ops_page and commit what it writes."
    )


def test_a_stale_page_fails_the_command(tmp_path, monkeypatch, capsys):
    stale = tmp_path / "ops.md"
    stale.write_text("old")
    monkeypatch.setattr(ops_page, "PAGE", stale)
    monkeypatch.setattr("sys.argv", ["ops_page", "--check"])
    assert ops_page.main() == 1
    assert "Run python -m scripts.ops_page and commit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overload", "way"),
    [
        (torch.ops.aten.add.Tensor, How.LOWERED),
        (torch.ops.aten.view.default, How.VIEW),
        (torch.ops.aten.copy_.default, How.SPECIAL),
        (torch.ops.aten.add_.Tensor, How.IN_PLACE),
        (torch.ops.aten._fused_adamw_.default, How.IN_PLACE),
        (torch.ops.aten.squeeze_.dim, How.IN_PLACE),
        (torch.ops.aten.add.out, How.OUT),
        (torch.ops.aten._foreach_add.List, How.COMPOSED),
        (torch.ops.aten._to_sparse.default, How.HOST),
    ],
    ids=str,
)
def test_how_an_overload_is_carried_out(overload, way):
    assert router.how(overload) is way


def test_no_core_operation_runs_on_the_host():
    core = [op for op in ops_page.overloads() if torch.Tag.core in op.tags]
    assert len(core) > 150
    assert [str(op) for op in core if router.how(op) is How.HOST] == []
