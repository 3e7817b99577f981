"""A function's body is replaced for those who have its name already."""

import inspect

from spmd_core.torch_backend.function_bodies import replace_body


def plus(a, b=2, *, c=3):
    """Adds."""
    return a + b + c


def test_a_function_keeps_its_identity_signature_and_original():
    early, text = plus, str(inspect.signature(plus))
    replace_body(plus, lambda original: lambda *args, **kwargs: [original(*args, **kwargs)])
    assert early(1) == [6] and early(1, c=0) == [3] and plus is early
    assert str(inspect.signature(plus)) == text and plus.__doc__ == "Adds."
