"""Pieces of text are final, whole characters, and together the whole text."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from examples.llama_serving.tests.tiny import tiny_tokenizer
from examples.llama_serving.text import (
    MAX_HELD_TOKENS,
    UNDECODABLE,
    Detokenizer,
    PromptEncoder,
    PromptError,
    StopStrings,
)


def sentence_pieces() -> Any:
    """As SentencePiece's tokenizers of Llama 1 and 2: words with their space, and single bytes."""
    words = ["<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁a", "▁bc", "d", "ü", "▁"]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


BYTES, PIECES = tiny_tokenizer(), sentence_pieces()
CHARACTERS = [list(character.encode()) for character in "é€😀\U0001f3f3"]
FORMS = {
    "bytes": [[i] for i in range(2, 320)],
    "pieces": [[i] for i in range(257, 262)] + [[1 + b for b in c] for c in CHARACTERS],
}


def whole(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@given(data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_pieces_together_are_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer = BYTES if kind == "bytes" else PIECES
    parts = data.draw(st.lists(st.sampled_from(FORMS[kind]), max_size=24))
    ids = [token for part in parts for token in part]
    at = data.draw(st.integers(0, len(ids)))
    if whole(tokenizer, ids[:at]).endswith(UNDECODABLE):
        at = 0
    detokenizer = Detokenizer(tokenizer, ids[:at])
    pieces = [detokenizer.add(token) for token in ids[at:]]
    text = "".join(pieces) + detokenizer.finish()
    assert whole(tokenizer, ids[:at]) + text == whole(tokenizer, ids)
    assert not any(piece.endswith(UNDECODABLE) for piece in pieces)


def test_the_context_of_a_prompt_begins_with_a_character() -> None:
    prompt = [1 + byte for byte in "😀€".encode()]
    for cut in range(5):
        assert Detokenizer(PIECES, prompt[cut:]).add(257) == " a"


def test_a_character_comes_whole() -> None:
    detokenizer = Detokenizer(PIECES)
    assert [detokenizer.add(1 + byte) for byte in "😀".encode()] == ["", "", "", "😀"]


def test_bytes_without_end_are_given_as_they_are() -> None:
    detokenizer = Detokenizer(PIECES)
    pieces = [detokenizer.add(1 + 0xFF) for _ in range(MAX_HELD_TOKENS)]
    assert pieces == [""] * (MAX_HELD_TOKENS - 1) + [UNDECODABLE * MAX_HELD_TOKENS]
    assert detokenizer.add(259) == "d"


def test_special_tokens_are_no_text_and_the_prompts_space_stays() -> None:
    assert "".join(map(Detokenizer(PIECES, [257]).add, [258, 0, 257])) == " bc a"
    assert "".join(map(Detokenizer(PIECES).add, [258, 0, 257])) == "bc a"


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.data(),
)
@settings(max_examples=examples(100), deadline=None)
def test_a_text_ends_before_its_first_stop_string(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    stop = StopStrings(stops)
    found, given_to = "", 0
    for end in [*cuts, len(text)]:
        found += stop.add(text[given_to:end])
        given_to = end
        if stop.has_stopped:
            break
        held = text[len(found) : end]
        assert not held or any(s.startswith(held) for s in stops)  # nothing is held for no reason
    # The first string that is complete ends the text; of those that are, the one that begins first.
    seen = text[:given_to]
    places = [place for s in stops if (place := seen.find(s)) >= 0]
    assert stop.has_stopped == bool(places)
    assert found + stop.finish() == (seen[: min(places)] if places else text)


def test_a_chat_without_a_template_is_plain() -> None:
    ids = PromptEncoder(BYTES).encode_chat(
        [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    )
    assert whole(BYTES, ids) == "system: be\n\nuser: hi\n\nassistant:"


def test_a_chat_follows_the_tokenizers_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<s>{{ m.content }}{% endfor %}"
    )
    encoder = PromptEncoder(tokenizer)
    assert encoder.encode_chat([{"role": "user", "content": "hi"}]) == [0, *encoder.encode("hi")]
    with pytest.raises(PromptError, match="got the roles system, and the template says: no system"):
        encoder.encode_chat([{"role": "system", "content": "be"}])
