"""The sizes in a Llama's config.json, checked before anything is built from them."""

from collections.abc import Mapping
from typing import Any

_COUNTS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
)


def wrong_size(config: Mapping[str, Any]) -> str | None:
    """The error of the first size that no model can have, as text; None if all are right.

    A size that is absent or null has the default of transformers.
    """
    for name in _COUNTS:
        value = config.get(name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if value is not None and not is_count:
            return f"{name} must be a whole number of at least 1; got {value!r}"
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads is not None and shared is not None and heads % shared:
        return (
            f"num_key_value_heads must divide num_attention_heads; got {shared} for {heads} heads"
        )
    return None
