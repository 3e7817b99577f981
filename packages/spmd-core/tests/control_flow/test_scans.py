"""Scans against loops in plain Python, with their gradients, on whole and on split tensors."""

import pytest
import torch
from control_flow.eager_loops import both, on
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import spmd_core as spmd
from spmd_core.control_flow import scan
from spmd_core.errors import ControlFlowError, DeviceMismatchError

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_a_recurrence_with_gradients_of_gradients():
    def compute(device, w, b, h, x):
        doubled = w * 2  # computed outside, closed over

        def fn(h, x):
            h = torch.tanh(h @ doubled + x @ w + b)
            return h, torch.relu(h) * h.max()

        h_last, ys = on(device)[0](fn, h, x)
        first = torch.autograd.grad(
            h_last.square().sum() + ys.sum(), (w, b, h, x), create_graph=True
        )
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (w, b, h, x))
        return [h_last, ys, *first, *second]

    w, b = torch.randn(4, 4) / 2, torch.randn(4)
    both(compute, w, b, torch.randn(3, 4), torch.randn(5, 3, 4), rtol=1e-3, atol=1e-3)


def test_trees_directions_and_lengths():
    def compute(device, x):
        def fn(carry, x):
            total = carry["total"] + x["a"]
            return {"total": total, "n": carry["n"] + 1}, (total * x["b"], {"n": carry["n"]})

        init = {"total": x[0] * 0, "n": torch.zeros((), dtype=torch.int32).to(device)}
        last, (y, more) = on(device)[0](fn, init, {"a": x, "b": x * 2}, reverse=True)
        (grad,) = torch.autograd.grad(y.sum() + last["total"].square().sum(), x)
        return [last["total"], last["n"], y, more["n"], grad]

    both(compute, X)
    x = X.to("xla")
    doubled, nothing = scan(lambda c, _: (c * 2, None), x, length=3)
    assert nothing is None and torch.equal(doubled.cpu(), X * 8)
    last, ys = scan(lambda c, x: (c + 1, x * 2), torch.zeros((), device="xla"), x[:0])
    assert last.item() == 0 and ys.cpu().shape == (0, 4)


def test_a_result_whose_gradient_is_not_asked_for_costs_none():
    """Of the carry, of all y, of one of them; also a second time, with other gradients."""

    def compute(device, w, x):
        def fn(c, x):
            c = torch.tanh(c @ w + x)
            return c, (c, c.sin() * w.sum(), c.detach())

        last, (carries, sines, _) = on(device)[0](fn, x[0], x)
        weights = torch.linspace(0, 1, 4, device=device)
        losses = [(last * weights).sum(), (sines * weights).sum(), carries[1].square().sum()]
        losses.append(losses[0] + losses[1])
        found = [torch.autograd.grad(loss, (w, x), retain_graph=True) for loss in losses]
        again = torch.autograd.grad(losses[2], (w, x), create_graph=True)
        second = torch.autograd.grad(again[0].sum(), (w, x))
        return [last, *(g for pair in found for g in pair), *second]

    both(compute, torch.randn(4, 4) / 2, X, rtol=1e-3)
    w, x = (t.to("xla").requires_grad_() for t in (torch.randn(4, 4), torch.randn(6, 2, 4)))
    last, carries = scan(lambda c, x: (c @ w + x, c @ w), x[0], x)
    for loss, count in ((last.sum(), 0), (last.sum() + carries.sum(), 1)):
        text = spmd.debugging.operations(torch.autograd.grad(loss, w, retain_graph=True)[0])
        made = [line.split("(")[0] for line in text.splitlines() if "-> float32[6, 2, 4]" in line]
        assert sum("expand" in name or "zeros" in name for name in made) == count, text


def test_loops_and_branches_in_a_loop():
    def compute(device, w, x):
        loop, choose = on(device)

        def inner(c, x):
            c = torch.tanh(c @ w + x)
            return choose(c.sum() > 0, lambda c: c * w.sum(), lambda c: c.sin(), c), c

        def outer(c, xs):
            c, ys = loop(inner, c, xs)
            return c + w.diagonal(), ys.sum(0)

        c, ys = loop(outer, x[0, 0] * 0, x)
        return [c, ys, *torch.autograd.grad(c.sum() + ys.square().sum(), (w, x))]

    both(compute, torch.randn(4, 4) / 2, torch.randn(3, 5, 4))


def stack_of_layers(device, sharding, ids, h, tensors):
    """Loss, results and gradients of a stack of blocks, whose stacked weights a scan goes over."""
    names = ("w1", "w2", "scale", "bias", "table")
    given = dict(zip(names, tensors)) | {"ids": ids, "h": h}
    for name, (mesh, spec) in sharding.items():
        if device == "xla":
            spmd.mark_sharding(given[name], mesh, spec)

    def block(h, layer):
        w1, w2, scale = layer
        u = functional.layer_norm(h, h.shape[-1:]) * scale
        h = h + functional.gelu(u @ w1 + given["bias"]) @ w2
        h = h + functional.embedding(ids, given["table"])
        h = h + torch.softmax(h @ h.transpose(-1, -2), -1) @ h / 10
        return h, h.amax(-1).cumsum(-1)

    h, ys = on(device)[0](block, h, tuple(given[name] for name in names[:3]))
    loss = h.square().mean() + ys.square().mean()
    wanted = [given["h"], *(given[name] for name in names)]
    return [loss, h, ys, *torch.autograd.grad(loss, wanted)]


SPLITS = {
    "data": {"ids": ("a", None), "h": ("a", None, None), "w1": (None, "a", "b")},
    "weights": {
        "w1": (None, "a", "b"),
        "w2": (None, "b", "a"),
        "bias": ("b",),
        "table": ("b", "a"),
        "scale": (None, "a"),
    },
    "loop": {"w1": ("a", None, "b"), "w2": ("b", "a", None), "h": (None, "b", "a")},
    "joined": {"h": (("a", "b"), None, None), "w1": (None, ("a", "b"), None)},
}


@pytest.mark.parametrize(
    ("split", "sizes", "axes"),
    [
        ("data", (8, 4, 8, 16, 3), 2),
        ("weights", (6, 5, 10, 7, 3), 2),
        ("loop", (8, 4, 8, 16, 4), 2),
        ("joined", (6, 5, 10, 7, 3), 2),
        ("weights", (6, 5, 10, 7, 3), 1),
    ],
)
def test_a_stack_of_layers_on_split_tensors(split, sizes, axes, mesh_1d, mesh_2d):
    batch, time, width, hidden, layers = sizes
    names = {"a": "x", "b": None} if axes == 1 else {"a": "a", "b": "b"}

    def renamed(spec):
        found = (tuple(names[n] for n in e) if isinstance(e, tuple) else names.get(e) for e in spec)
        return tuple(found)

    mesh = mesh_1d if axes == 1 else mesh_2d
    sharding = {name: (mesh, renamed(spec)) for name, spec in SPLITS[split].items()}
    shapes = [
        (layers, width, hidden),
        (layers, hidden, width),
        (layers, width),
        (hidden,),
        (11, width),
    ]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) / 3 for shape in shapes]
    h = torch.randn(batch, time, width, generator=generator)
    ids = torch.randint(0, 11, (batch, time), generator=generator)

    def compute(device, ids, h, *tensors):
        return stack_of_layers(device, sharding, ids, h, tensors)

    both(compute, ids, h, *tensors, rtol=1e-3, atol=1e-4)


def test_the_gradient_of_a_stack_is_split_inside_of_the_loop(mesh_1d, num_devices):
    if num_devices != 8:
        pytest.skip("the shapes are those of eight devices")
    w = spmd.mark_sharding(torch.randn(6, 64, 64, device="xla") / 10, mesh_1d, (None, "x", None))
    w.requires_grad_()
    h = spmd.mark_sharding(torch.randn(16, 4, 64, device="xla"), mesh_1d, ("x", None, None))
    spmd.sync()
    h, _ = scan(lambda h, w: (torch.tanh(h @ w), None), h, w)
    h.square().mean().backward()
    spmd.sync()
    loops = [
        line.split(" while(")[0]
        for line in spmd.debugging.hlo(program=spmd.metrics.programs()[-1]).splitlines()
        if " while(" in line
    ]
    assert len(loops) == 2
    assert all("f32[6,8,64]" in loop and "f32[6,64,64]" not in loop for loop in loops)
    assert w.grad.sharding_spec == w.sharding_spec


def test_a_program_does_not_grow_with_the_length():
    def size(length):
        x = torch.ones(length, 4, device="xla", requires_grad=True)
        _, ys = scan(lambda c, x: (c + x.sin(), c * x), x[0] * 0, x)
        (grad,) = torch.autograd.grad(ys.sum(), x)
        return len(spmd.debugging.operations(grad).splitlines())

    assert size(3) == size(300)


def test_the_same_function_is_the_same_program():
    x = torch.ones(3, 4, device="xla")
    for _ in range(3):
        scan(lambda c, x: (c + x, None), x[0], x)[0].cpu()
    programs = len(spmd.metrics.programs())
    scan(lambda c, x: (c + x, None), x[0], x)[0].cpu()
    assert len(spmd.metrics.programs()) == programs


def test_dropout_draws_other_numbers_in_each_iteration_and_the_same_in_backward():
    x = torch.ones(3, 200, device="xla", requires_grad=True)

    def plain(c, x):
        return c, functional.dropout(x, 0.5)

    def again(c, x):
        return c, checkpoint(lambda x: functional.dropout(x, 0.5), x, use_reentrant=False)

    for fn in (plain, again):
        y = scan(fn, torch.zeros((), device="xla"), x)[1]
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad.cpu(), y.detach().cpu())
        assert len({tuple(row) for row in y.tolist()}) == 3

    def nested(c, _):
        ones = torch.ones(200, device="xla")
        return scan(lambda c, _: (c, functional.dropout(ones, 0.5)), c, length=3)

    y = scan(nested, torch.zeros((), device="xla"), length=4)[1].reshape(12, 200)
    assert len({tuple(row) for row in y.tolist()}) == 12
    y = scan(plain, torch.zeros((), device="xla"), x)[1]
    with pytest.raises(ControlFlowError, match="Draw the numbers before, and pass them in xs"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_autocast_and_what_is_not_torchs():
    w = torch.randn(4, 4, device="xla", requires_grad=True)
    with torch.autocast("xla", dtype=torch.bfloat16):
        c, y = scan(
            lambda c, x: ((c @ w + x).float(), c @ w), X[:1].to("xla"), X[:, None].to("xla")
        )
    assert y.dtype is torch.bfloat16
    assert torch.autograd.grad(c.sum(), w)[0].dtype is torch.float32

    def compute(device, w, x):
        def product(x):
            return spmd.call_jax(lambda a, b: a @ b, x, w) if device == "xla" else x @ w

        ys = on(device)[0](lambda c, x: (c + x, product(x)), x[0] * 0, x)[1]
        return [ys, *torch.autograd.grad(ys.square().sum(), (w, x))]

    both(compute, torch.randn(4, 4), X)
    computed = w * 2
    with pytest.raises(ControlFlowError, match="Pass the tensor as an operand"):
        scan(
            lambda c, x: (c, spmd.call_jax(lambda a, b: a @ b, x, computed)),
            torch.zeros((), device="xla"),
            X.to("xla"),
        )


def test_indices_are_checked_in_loops():
    table, ids = torch.arange(10.0, device="xla"), torch.tensor([[1, 2], [3, 12]]).to("xla")
    first = torch.zeros((), device="xla")
    spmd.config.check_indices = True
    _, rows = scan(lambda c, i: (c, table[i]), first, ids)
    with pytest.raises(IndexError, match=r"aten::index\.Tensor in spmd::scan"):
        rows.cpu()
    _, rows = scan(lambda c, i: (c, table[i]), first, ids.clamp(max=9))
    assert rows.tolist() == [[1, 2], [3, 9]]


def test_verify_looks_into_loops(mesh_1d):
    x = spmd.mark_sharding(torch.ones(3, 16, device="xla"), mesh_1d, (None, "x"))
    with spmd.debugging.verify():
        y = scan(lambda c, x: (c + x.sum(), x.cumsum(0)), torch.zeros((), device="xla"), x)[1]
    assert y.sum().item() == 3 * 16 * 17 / 2


@pytest.mark.parametrize(
    ("fn", "error", "advice"),
    [
        (lambda c, x: c, TypeError, "Return (carry, y), with None for no y"),
        (lambda c, x: ((c, c), None), TypeError, "Return the same lists, tuples and dicts"),
        (lambda c, x: (torch.cat([c, x]), None), TypeError, "got float32[8] for float32[4]"),
        (lambda c, x: ((c + x).double(), None), TypeError, "Convert one of them: .to(dtype)"),
        (lambda c, x: (c, 1.0), TypeError, "torch.tensor(value, device='xla')"),
        (lambda c, x: (c, torch.ones(2)), DeviceMismatchError, "Move it first: t = t.to('xla')"),
        (lambda c, x: (c + x.sum().item(), None), ControlFlowError, "Read before or after it"),
        (lambda c, x: (c if x.sum() > 0 else x, None), ControlFlowError, "torch.where or cond"),
        (lambda c, x: (c.add_(x), None), ControlFlowError, "Return the new value"),
    ],
)
def test_a_function_that_no_loop_can_run(fn, error, advice):
    x = X.to("xla")
    with pytest.raises(error) as found:
        scan(fn, x[0], x)
    assert advice in str(found.value)
    assert torch.equal(scan(lambda c, x: (c + x, None), x[0] * 0, x)[0].cpu(), X.sum(0))


def test_gradients_inside_of_a_function():
    x = X.to("xla")
    w = torch.ones(4, device="xla", requires_grad=True)

    def accumulating(c, x):
        (w * x).sum().backward()
        return c, None

    with pytest.raises(ControlFlowError, match="return the gradients or carry their sum"):
        scan(accumulating, x[0], x)
    assert w.grad is None

    def returning(total, x):  # the advice
        (grad,) = torch.autograd.grad((w * x).sum(), w)
        return total + grad, None

    total, _ = scan(returning, torch.zeros(4, device="xla"), x)
    torch.testing.assert_close(total.cpu(), X.sum(0))


def test_the_text_of_a_program_has_what_a_loop_runs():
    x = torch.ones(3, 4, device="xla")
    text = spmd.debugging.operations(scan(lambda c, x: (c + x, c * x), x[0], x)[1])
    assert "spmd::scan(" in text and "\n    1: aten::mul.Tensor(input 0, input 1)" in text
    assert "\n    %1 = aten::mul.Tensor(input 0, input 1)" in spmd.debugging.passes(
        scan(lambda c, x: (c + x, c * x), x[0], x)[1]
    )


def test_a_function_that_writes_outside_or_leaks():
    x, outside, kept = X.to("xla"), torch.zeros(4, device="xla"), []
    for write in (
        lambda x: outside.add_(x),
        lambda x: setattr(outside, "data", outside.data + x),
        lambda x: outside.data.add_(x),
        lambda x: outside.set_(x),
        lambda x: outside.resize_(2),
        lambda x: outside.unsqueeze_(0),
    ):
        with pytest.raises(ControlFlowError, match="a write in place to a tensor from outside"):
            scan(lambda c, x, write=write: (c, write(x)), x[0], x)
        assert outside.tolist() == [0] * 4
    with pytest.raises(ControlFlowError, match="a write in place to the carry"):
        scan(lambda c, x: (setattr(c, "data", c + x), (c, x))[1], x[0], x)

    def leaking(c, x):
        kept.append(c + x)
        return c + x, None

    scan(leaking, x[0], x)
    with pytest.raises(ControlFlowError, match="Return it from the function"):
        (kept[0] + 1).cpu()
    _, ys = scan(lambda c, x: (c + x, c + x), x[0] * 0, x)  # the advice
    assert torch.equal(ys.cpu(), X.cumsum(0))


def test_arguments():
    x = X.to("xla")
    for xs, length in (((x, x[:2]), None), (None, None), (x, 5)):
        with pytest.raises(ValueError, match="Give tensors of one length, or length=n"):
            scan(lambda c, x: (c, None), x[0], xs, length=length)
    with pytest.raises(ValueError, match="Close over it, or expand it"):
        scan(lambda c, x: (c, None), x[0], x.sum())
    with pytest.raises(TypeError, match="fn"):
        scan(None, x[0], x)


@pytest.mark.parametrize("specs", [None, ((None, "a"), ("b", None), ("a", "b", None))])
def test_hooks_for_saved_tensors_around_a_loop(specs, mesh_2d):
    """A checkpoint around a loop, and one on the CPU, save its operands, and no stand-ins."""

    def compute(device, w, h, x):
        if device == "xla" and specs is not None:
            for t, spec in zip((w, h, x), specs):
                spmd.mark_sharding(t, mesh_2d, spec)
        loop, choose = on(device)

        def run(h):
            return loop(lambda c, x: (torch.sin(c @ w) * x, c), h, x)[0]

        def branch(h):
            return choose(h.sum() < 99, lambda h: torch.sin(h @ w), lambda h: h, h)

        results = [checkpoint(f, h, use_reentrant=False) for f in (run, branch)]
        with torch.autograd.graph.save_on_cpu():
            results.append(run(h))
        return [*results, *torch.autograd.grad(sum(r.sum() for r in results), (w, h, x))]

    both(compute, torch.randn(4, 4) / 2, torch.randn(6, 4), torch.randn(3, 6, 4))


def test_a_write_to_what_autograd_saved_is_noticed():
    def step(c, x):
        e = torch.exp(c)
        y = e * 2
        e.mul_(3)
        return y, None

    x = X.to("xla").requires_grad_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scan(step, x[0], x)


def test_the_gradient_of_a_tensor_from_outside_is_read():
    def compute(device, w, x):
        w.square().sum().backward()
        return [on(device)[0](lambda c, x: (c @ w.grad + x, c), x[0].detach(), x)[0]]

    both(compute, torch.randn(4, 4) / 2, X)


def test_gradients_are_computed_outside_of_autocast():
    """As those of a layer whose forward runs in float32 inside of it, and backward behind it."""

    def compute(device, w, x):
        loop, choose = on(device)
        with torch.autocast(device, dtype=torch.bfloat16):

            def step(c, x):
                with torch.autocast(device, enabled=False):
                    return torch.tanh(c @ w + x), c

            h, _ = loop(step, x[0], x)
            h = choose(h.sum() < 99, lambda h: step(h, h)[0], lambda h: h, h)
        return [h, *torch.autograd.grad(h.square().sum(), (w, x))]

    both(compute, torch.randn(4, 4), X, rtol=1e-5)


def test_loops_and_branches_in_inference_mode():
    def compute(device, w, x):
        loop, choose = on(device)
        with torch.inference_mode():
            h, y = loop(lambda c, x: (torch.tanh(c @ w + x), c.clone().add_(1)), x[0], x)
            return [h, y, choose(h.sum() < 99, lambda h: h @ w, lambda h: h, h)]

    both(compute, torch.randn(4, 4) / 2, X)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # torch's forward mode
def test_what_loops_do_not_transform():
    x, w = X.to("xla"), torch.eye(4).to("xla")

    def loss(w):
        return scan(lambda c, x: (torch.tanh(c @ w + x), None), x[0], x)[0].sum()

    for transform in (torch.func.grad, torch.vmap):
        with pytest.raises(ControlFlowError, match="give tensors a batch dim"):
            transform(loss)(w)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(w, w)
        primal = forward_ad.unpack_dual(dual).primal
        for run in (loss, lambda w: spmd.control_flow.cond(w.sum() > 0, loss, loss, w)):
            with pytest.raises(ControlFlowError, match="pass the primal"):
                run(dual)
            assert run(primal).item() == loss(w).item()  # the advice
    w.requires_grad_()
    assert torch.autograd.grad(loss(w), w)[0].shape == (4, 4)


@pytest.mark.parametrize("follows", [False, True])
def test_a_stack_is_one_operand(follows):
    xs = torch.randn(3, 4, 4, device="xla", requires_grad=follows)
    last, _ = spmd.scan(lambda c, x: (c @ x, None), torch.ones(2, 4, device="xla"), xs)
    value = last._handle.value
    assert len((value.parent or value).inputs) == 2  # the carry and the stack
