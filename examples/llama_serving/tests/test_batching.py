"""Prompts that come together are computed together, in few sizes, and none is left out."""

from hypothesis import given
from hypothesis import strategies as st

from examples.llama_serving.batching import MOST_TOKENS, PromptSizes


@given(st.integers(1, 20), st.integers(1, 3000), st.data())
def test_each_prompt_is_in_one_group_that_a_program_takes(
    num_slots: int, length: int, data: st.DataObject
) -> None:
    sizes = PromptSizes(num_slots=num_slots, length=length)
    lengths = data.draw(st.lists(st.integers(1, length), max_size=num_slots))
    groups = list(sizes.together(enumerate(lengths), lambda x: x[1]))
    assert sorted(x for group in groups for x in group) == list(enumerate(lengths))
    for group in groups:
        (bucket,) = {sizes.bucket(n) for _, n in group}
        assert bucket < 2 * max(32, *(n for _, n in group))
        assert len(group) <= sizes.rows(bucket)[-1] <= num_slots
        assert [i for i, _ in group] == sorted(i for i, _ in group)


def test_what_is_compiled() -> None:
    sizes = PromptSizes(num_slots=8, length=2048)
    assert sizes.rows(32) == (1, 2, 4, 8) == sizes.rows(64)
    assert sizes.rows(256) == (1, 2) and sizes.rows(2048) == (1,)
    assert all(rows == 1 or rows * bucket <= MOST_TOKENS for rows, bucket in sizes.all())
    # The longest prompt has no more tokens than several others together.
    short = PromptSizes(num_slots=8, length=100)
    assert short.all() == [(1, 32), (2, 32), (3, 32), (1, 64), (1, 100)]
