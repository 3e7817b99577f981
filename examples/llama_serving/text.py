"""Text of a request: its prompt as tokens, and tokens as text that grows by whole characters."""

import threading
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

UNDECODABLE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer gives for bytes that are no character
MAX_HELD_TOKENS = 32

# Of tokenizers without a template of their own: a role and a colon before each message's text, an
# empty line behind it. The model continues after "assistant:".
PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class PromptError(ValueError):
    """A prompt cannot be turned into tokens."""


class PromptEncoder:
    """Turns prompts into token ids; threads may share it.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        # The first call may change settings that its file has, such as truncation. It must not be
        # while another thread decodes.
        self.encode("")

    def encode(self, text: str) -> list[int]:
        """The text's tokens, with the special tokens that the tokenizer puts around a text."""
        with self._lock:
            ids: list[int] = self._tokenizer(text).input_ids
        return ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The conversation's tokens, up to where the assistant's answer begins.

        The tokenizer's template writes it, special tokens included; `PLAIN_CHAT_TEMPLATE` if it has
        none.

        Raises:
            PromptError: the template refuses the messages.
        """
        own = self._tokenizer.chat_template is not None
        template = None if own else PLAIN_CHAT_TEMPLATE
        try:
            with self._lock:
                text = self._tokenizer.apply_chat_template(
                    list(messages),
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=True,
                )
                ids: list[int] = self._tokenizer(text, add_special_tokens=not own).input_ids
        # A template's code may also fail as Python does, for an order of roles or a text.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            roles = [message["role"] for message in messages]
            raise PromptError(
                "messages must be as the model's chat template requires; got the roles "
                f"{', '.join(roles)}, and the template says: {error}. Change the messages."
            ) from None
        return ids


class Detokenizer:
    """Gives the text of tokens as they come: each piece is final, and no character is cut.

    All pieces together are the tokens' text, without special tokens. Bytes that may still become a
    character are held back, for up to `MAX_HELD_TOKENS` tokens.

    Args:
        tokenizer: the model's.
        prompt: the tokens before the first one. Tokenizers drop a space at the beginning of a text,
            and the continuation of a prompt is no beginning.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # One token of context would do, if it were not special. A context that begins within a
        # character is no text; of four in a row, one begins where a character does.
        contexts = (list(prompt[-num:]) for num in (4, 5, 6, 7, 3, 2, 1))
        whole = (ids for ids in contexts if not self._decode(ids).endswith(UNDECODABLE))
        self._ids = next(whole, [])
        self._num_known = len(self._ids)  # tokens whose text was given

    def add(self, token: int) -> str:
        """The text that the token completes; often empty."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(UNDECODABLE):
            if len(self._ids) - self._num_known < MAX_HELD_TOKENS:
                return ""
            return self.finish()
        piece = text[len(self._decode(self._ids[: self._num_known])) :]
        if piece:  # the tokens of the last piece are the context of the next one
            del self._ids[: self._num_known]
            self._num_known = len(self._ids)
        return piece

    def finish(self) -> str:
        """What is still held back, with `UNDECODABLE` for what is no character."""
        piece = self._decode(self._ids)[len(self._decode(self._ids[: self._num_known])) :]
        self._ids, self._num_known = [], 0
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        options: Any = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        text: str = self._tokenizer.decode(ids, **options)
        return text


class StopStrings:
    """Ends a text before the first of some strings, and holds back what may be the start of one.

    Args:
        strings: none of them empty.

    Example:
        >>> stop = StopStrings(["stop"])
        >>> stop.add("a s"), stop.add("to"), stop.add("re s"), stop.add("top b"), stop.has_stopped
        ('a ', '', 'store ', '', True)
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.has_stopped = False

    def add(self, text: str) -> str:
        """The part of the text so far that is final and was not given yet."""
        text = self._held + text
        found = [place for place in map(text.find, self._strings) if place >= 0]
        if found:
            self._held, self.has_stopped = "", True
            return text[: min(found)]
        longest = max(map(len, self._strings), default=0)
        starts = range(max(0, len(text) - longest + 1), len(text))
        end = next((i for i in starts if self._may_begin(text[i:])), len(text))
        self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        text, self._held = self._held, ""
        return text

    def _may_begin(self, text: str) -> bool:
        return any(string.startswith(text) for string in self._strings)
