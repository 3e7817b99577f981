"""Every view operation of torch's schema: a view of a newer torch without a sample here fails."""

import pytest
import torch
from torch.utils import _pytree as pytree

import spmd_core as spmd
from spmd_core.ops import registry
from spmd_core.recording import schema

aten = torch.ops.aten

# Views in the schema that dense tensors on a device do not have, and why.
EXCLUDED = {
    **dict.fromkeys(
        ("aten::_indices", "aten::_values", "aten::indices", "aten::values", "aten::coalesce"),
        "a part of a sparse tensor",
    ),
    **dict.fromkeys(
        ("aten::ccol_indices", "aten::col_indices", "aten::crow_indices", "aten::row_indices"),
        "a part of a compressed sparse tensor",
    ),
    **dict.fromkeys(("aten::_sparse_broadcast_to",), "of a sparse tensor"),
    **dict.fromkeys(
        (
            "aten::_nested_get_values",
            "aten::_nested_view_from_buffer",
            "aten::_nested_view_from_jagged",
        ),
        "of a nested tensor",
    ),
    **dict.fromkeys(
        ("aten::_fw_primal", "aten::_make_dual", "aten::_unpack_dual"),
        "forward-mode AD's own, not called by users",
    ),
    **dict.fromkeys(
        ("aten::_autocast_to_full_precision", "aten::_autocast_to_reduced_precision"),
        "TorchScript's autocast",
    ),
    "aten::_test_autograd_multiple_dispatch_view": "torch's own test",
    "aten::pin_memory": "host memory",
}


def real(d):
    return torch.arange(24.0).view(4, 6).to(d) + 0


def complex_(d):
    return torch.complex(real(d), real(d).flip(0)).clone()


# name: (a function that makes the base, the view)
SAMPLES = {
    "aten::_conj": (complex_, lambda x: aten._conj(x)),
    "aten::_neg_view": (real, lambda x: torch._neg_view(x)),
    "aten::_reshape_alias": (real, lambda x: aten._reshape_alias(x, [2, 12], [12, 1])),
    "aten::adjoint": (complex_, lambda x: x.adjoint()),
    "aten::alias": (real, lambda x: aten.alias(x)),
    "aten::as_strided": (real, lambda x: x.as_strided((2, 3), (3, 2), 1)),
    "aten::broadcast_to": (real, lambda x: x.broadcast_to(1, 4, 6)),
    "aten::chunk": (real, lambda x: x.chunk(3, 1)),
    "aten::conj": (complex_, lambda x: x.conj()),
    "aten::contiguous": (real, lambda x: x.contiguous()),
    "aten::detach": (real, lambda x: x.detach()),
    "aten::diagonal": (real, lambda x: x.diagonal(1)),
    "aten::dsplit.array": (lambda d: real(d).view(2, 2, 6), lambda x: torch.dsplit(x, [2, 3])),
    "aten::dsplit.int": (lambda d: real(d).view(2, 2, 6), lambda x: torch.dsplit(x, 2)),
    "aten::expand": (real, lambda x: x.expand(1, 4, 6)),
    "aten::expand_as": (real, lambda x: x.expand_as(x)),
    "aten::flatten.using_ints": (real, lambda x: x.flatten()),
    "aten::hsplit.array": (real, lambda x: torch.hsplit(x, [2, 3])),
    "aten::hsplit.int": (real, lambda x: torch.hsplit(x, 2)),
    "aten::imag": (complex_, lambda x: x.conj().imag),
    "aten::lift_fresh": (real, lambda x: aten.lift_fresh(x)),
    "aten::linalg_diagonal": (real, lambda x: torch.linalg.diagonal(x)),
    "aten::mH": (complex_, lambda x: x.mH),
    "aten::mT": (real, lambda x: x.mT),
    "aten::matrix_H": (complex_, lambda x: x.H),
    "aten::moveaxis.int": (real, lambda x: x.moveaxis(0, 1)),
    "aten::moveaxis.intlist": (real, lambda x: x.moveaxis((0, 1), (1, 0))),
    "aten::movedim.int": (real, lambda x: x.movedim(0, -1)),
    "aten::movedim.intlist": (real, lambda x: x.movedim((1, 0), (0, 1))),
    "aten::narrow": (real, lambda x: x.narrow(1, -3, 2)),
    "aten::narrow.Tensor": (real, lambda x: x.narrow(1, torch.tensor(2), 2)),
    "aten::numpy_T": (real, lambda x: x.T),
    "aten::permute": (real, lambda x: x.permute(1, 0)),
    "aten::positive": (real, lambda x: x.positive()),
    "aten::ravel": (real, lambda x: x.ravel()),
    "aten::real": (complex_, lambda x: x.real),
    "aten::reshape": (real, lambda x: x.reshape(3, 8)),
    "aten::reshape_as": (real, lambda x: x.reshape_as(torch.empty(3, 8))),
    "aten::resolve_conj": (complex_, lambda x: (x.conj().resolve_conj(), x.resolve_conj())),
    "aten::resolve_neg": (real, lambda x: x.resolve_neg()),
    "aten::select.int": (real, lambda x: x.select(1, -2)),
    "aten::slice.Tensor": (real, lambda x: x[1:, -5:-1:3]),
    "aten::slice_inverse": (real, lambda x: aten.slice_inverse(x[1:3], x, 0, 1, 3, 1)),
    "aten::split.Tensor": (real, lambda x: x.split(4, 1)),
    "aten::split.sizes": (real, lambda x: x.split((1, 3))),
    "aten::split_with_sizes": (real, lambda x: x.split_with_sizes([1, 5], -1)),
    "aten::squeeze": (lambda d: real(d)[:1], lambda x: x.squeeze()),
    "aten::squeeze.dim": (lambda d: real(d)[:1], lambda x: x.squeeze(0)),
    "aten::squeeze.dims": (lambda d: real(d)[:1], lambda x: x.squeeze((0, 1))),
    "aten::swapaxes": (real, lambda x: x.swapaxes(0, 1)),
    "aten::swapdims": (real, lambda x: x.swapdims(0, 1)),
    "aten::t": (real, lambda x: x.t()),
    "aten::tensor_split.indices": (real, lambda x: x.tensor_split((1, 3))),
    "aten::tensor_split.sections": (real, lambda x: x.tensor_split(3)),
    "aten::tensor_split.tensor_indices_or_sections": (
        real,
        lambda x: x.tensor_split(torch.tensor([1, 3])),
    ),
    "aten::to.device": (real, lambda x: x.to(x.device, x.dtype)),
    "aten::to.dtype": (real, lambda x: x.to(torch.float32)),
    "aten::to.dtype_layout": (real, lambda x: aten.to.dtype_layout(x, dtype=torch.float32)),
    "aten::to.other": (real, lambda x: x.to(x)),
    "aten::transpose.int": (real, lambda x: x.transpose(0, -1)),
    "aten::unbind.int": (real, lambda x: x.unbind(1)),
    "aten::unflatten.int": (real, lambda x: x.unflatten(1, (2, 3))),
    "aten::unfold": (real, lambda x: x.unfold(1, 2, 3)),
    "aten::unsqueeze": (real, lambda x: x.unsqueeze(-1)),
    "aten::view": (real, lambda x: x.view(-1, 8)),
    "aten::view.dtype": (
        real,
        lambda x: (x.view(torch.int32), x.view(torch.int16), x.view(torch.float64)),
    ),
    "aten::view_as": (real, lambda x: x.view_as(torch.empty(8, 3))),
    "aten::view_as_complex": (lambda d: real(d).view(4, 3, 2), lambda x: torch.view_as_complex(x)),
    "aten::view_as_real": (complex_, lambda x: torch.view_as_real(x)),
    "aten::vsplit.array": (real, lambda x: torch.vsplit(x, [1, 3])),
    "aten::vsplit.int": (real, lambda x: torch.vsplit(x, 2)),
}


def overloads():
    """(name, overload) of every aten overload that has a kernel."""
    for s in torch._C._jit_get_all_schemas():
        name = s.name + (f".{s.overload_name}" if s.overload_name else "")
        if s.name.startswith("aten::") and torch._C._dispatch_has_kernel(name):
            yield (
                name,
                getattr(getattr(aten, s.name.removeprefix("aten::")), s.overload_name or "default"),
            )


# Without views of named tensors, by strings: torch 2.13 no longer has them, and this device never
# had.
VIEWS = sorted(
    name
    for name, func in overloads()
    if schema.of(func).is_view and not any("str" in str(a.type) for a in func._schema.arguments)
)


def test_every_view_has_a_sample():
    unknown = set(VIEWS) - set(SAMPLES) - set(EXCLUDED)
    assert not unknown, (
        f"views of this torch without a sample: {sorted(unknown)}. "
        "Lower them in ops/views.py with a view_write, and add a sample."
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_a_write_through_the_view_reaches_its_base(name):
    if name not in VIEWS:
        pytest.skip("a view of newer torch versions")
    make, view = SAMPLES[name]
    shown = []
    for device in ("cpu", "xla"):
        base = make(device)
        before = spmd.metrics.counter("host_fallbacks")
        views = [v for v in pytree.tree_leaves(view(base)) if isinstance(v, torch.Tensor)]
        shape = [(v.shape, v.dtype, v.stride(), v.storage_offset()) for v in views]
        for i, v in enumerate(views):
            v.add_(v).add_(i + 1)
        assert spmd.metrics.counter("host_fallbacks") == before
        shown.append(
            (
                shape,
                [
                    x.cpu().resolve_conj().resolve_neg()
                    for x in (base, *views, base.clone(), *(v.clone() for v in views))
                ],
            )
        )
    assert shown[1][0] == shown[0][0]
    for got, right in zip(shown[1][1], shown[0][1], strict=True):
        torch.testing.assert_close(got, right.contiguous(), rtol=0, atol=0, equal_nan=True)


def test_copies_and_scatters_of_views_stay_on_the_device():
    """`view_copy`, `slice_scatter`, ...: lowered, or decomposed by torch into lowered ones."""
    known = {name for name, _ in overloads()}
    missing = []
    for name in VIEWS:
        op, _, overload = name.removeprefix("aten::").partition(".")
        for form in (f"{op}_copy", f"{op}_scatter"):
            full = f"aten::{form}" + (f".{overload}" if overload else "")
            if full in known and name not in EXCLUDED:
                func = getattr(getattr(aten, form), overload or "default")
                if registry.find_lowering(func) is None and not schema.has_kernel(
                    func, "CompositeImplicitAutograd"
                ):
                    missing.append(full)
    assert not missing
