"""docs/reference/ops.md agrees with the registry, the recorded results and the tests."""

import json
import re

import pytest
import torch

from scripts import ops_page
from spmd_core.dispatch import router
from spmd_core.dispatch.router import Route


def test_the_page_is_not_stale():
    text = ops_page.PAGE.read_text()
    version = re.search(r"It says of torch (\S+) what", text)[1]
    if version != torch.__version__.partition("+")[0]:
        pytest.skip(
            f"the page is of torch {version}, which has other overloads than {torch.__version__}"
        )
    assert text == ops_page.page(), (
        "docs/reference/ops.md is stale. Run python -m scripts.ops_page, and commit it."
    )


def test_a_stale_page_fails_the_command(tmp_path, monkeypatch, capsys):
    stale = tmp_path / "ops.md"
    stale.write_text("old")
    monkeypatch.setattr(ops_page, "PAGE", stale)
    assert ops_page.main(check=True) == 1
    assert "Run python -m scripts.ops_page, and commit" in capsys.readouterr().err


def test_the_columns_of_platforms_are_the_sweeps_results(tmp_path, monkeypatch):
    for target, found in {
        "v4-8": {"aten::add.Tensor": "compiles", "aten::linalg_eig": "host", "aten::mm": "not"},
        "cuda": {"aten::add.Tensor": "compiles", "aten::linalg_eig": "compiles"},
    }.items():
        file = tmp_path / f"compiles_{target}_1_devices.json"
        file.write_text(json.dumps({"overloads": found}))
    monkeypatch.setattr(ops_page, "RESULTS", tmp_path)
    text = ops_page.page()
    assert "| overload | route | dtypes | entries | TPU | CUDA | tests |" in text
    assert "| `add.Tensor` | lowered |  |  | compiles | compiles |" in text
    assert "| `linalg_eig.default` | lowered |  |  | host | compiles |" in text
    assert "| `mm.default` | lowered |  |  | not |  |" in text


def test_every_overload_that_was_swept_compiles_or_runs_on_the_host():
    for found in ops_page._platforms():
        assert len(found) > 500
        assert [name for name, outcome in found.items() if outcome == "not"] == []


@pytest.mark.parametrize(
    ("overload", "route"),
    [
        (torch.ops.aten.add.Tensor, Route.LOWERED),
        (torch.ops.aten.view.default, Route.VIEW),
        (torch.ops.aten.copy_.default, Route.SPECIAL),
        (torch.ops.aten.add_.Tensor, Route.IN_PLACE),
        (torch.ops.aten._fused_adamw_.default, Route.IN_PLACE),
        (torch.ops.aten.squeeze_.dim, Route.IN_PLACE),
        (torch.ops.aten.add.out, Route.OUT),
        (torch.ops.aten._foreach_add.List, Route.COMPOSED),
        (torch.ops.aten.qscheme.default, Route.HOST),
        (torch.ops.aten._to_sparse.default, Route.REFUSED),
    ],
    ids=str,
)
def test_route_of_an_overload(overload, route):
    assert router.route_of(overload) is route


def test_no_core_operation_runs_on_the_host():
    core = [op for op in ops_page.overloads() if torch.Tag.core in op.tags]
    assert len(core) > 150
    assert [str(op) for op in core if router.route_of(op) is Route.HOST] == []
