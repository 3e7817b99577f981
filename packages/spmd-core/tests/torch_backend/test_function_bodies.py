"""A function's body is replaced for those who have its name already."""

import inspect
import sys
import types

from spmd_core.torch_backend.function_bodies import replace_body


def plus(a, b=2, *, c=3):
    """Adds."""
    return a + b + c


def test_a_function_keeps_its_identity_signature_and_original():
    early, text = plus, str(inspect.signature(plus))
    replace_body(plus, lambda original: lambda *args, **kwargs: [original(*args, **kwargs)])
    assert early(1) == [6] and early(1, c=0) == [3] and plus is early
    assert str(inspect.signature(plus)) == text and plus.__doc__ == "Adds."


def decorated():
    one = 1

    def minus(a):
        return a - one

    return minus


minus = decorated()


def test_a_function_with_a_closure_is_replaced_in_its_module(monkeypatch):
    early = minus
    monkeypatch.setitem(sys.modules, early.__module__, types.ModuleType(early.__module__))
    replace_body(early, lambda original: lambda a: [original(a)])
    module = sys.modules[early.__module__]
    assert module.minus(1) == [0] and module.minus.__wrapped__ is early
