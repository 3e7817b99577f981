"""What clients send and get: the requests of OpenAI's interface, checked, and its answers."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from examples.llama_tp.serving.sampling import SamplingOptions

MAX_CHOICES = 16
_INT64 = 2**63
# Options that are known and not supported, with the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "functions": (None, []),
    "function_call": (None, "none"),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "stream_options": (None, {}, {"include_usage": False}),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
}
# Options that describe the request and change nothing about the answer.
_DESCRIBING = ("user", "metadata", "store")


class RefusedError(ValueError):
    """A request is refused.

    Attributes:
        status: of HTTP.
        param: the option that it is about.
        code: a word for programs.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class _Options(BaseModel):
    """What both kinds of requests share."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    default_max_tokens: ClassVar[int | None] = None  # None: as many as fit

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=_INT64)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in given:
            raise RefusedError(
                "stop strings must not be empty; got ''. Leave it out.", param="stop"
            )
        return tuple(given)

    @property
    def num_choices(self) -> int:
        """Continuations of each prompt."""
        return self.n or 1

    def sampling(self, choice: int) -> SamplingOptions:
        """How the tokens of a choice are chosen.

        The temperature is 1 where none is given, as in OpenAI's interface. Choice `i` has the seed
        `seed + i`, and a random one where none is given.
        """
        seed = secrets.randbits(62) if self.seed is None else self.seed + choice
        return SamplingOptions(
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else float(self.top_p),
            seed=(seed + _INT64) % (2 * _INT64) - _INT64,
        )


class CompletionRequest(_Options):
    """The body of `/v1/completions`; a prompt is a text or token ids, and there may be several."""

    default_max_tokens: ClassVar[int | None] = 16

    prompt: (
        str
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
    )

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        texts = [part for part in self.prompt if isinstance(part, str)]
        return [*texts] or [[part for part in self.prompt if isinstance(part, int)]]


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class ChatRequest(_Options):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


def parsed(kind: type[_Options], data: Any) -> Any:
    """A request from decoded JSON.

    Raises:
        RefusedError: with the rule, what was got, and what to do; status 422 for wrong types and
            ranges, 400 for what is not supported.
    """
    if not isinstance(data, dict):
        raise RefusedError(
            f"the body must be a JSON object; got {_shortened(data)}. Send for instance "
            '{"prompt": "Once"}.'
        )
    for name, neutral in _UNSUPPORTED.items():
        if name in data and not _is_any_of(data[name], neutral):
            raise RefusedError(
                f"{name} is not supported by this server; got {_shortened(data[name])}. "
                "Leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    ignored = (*_UNSUPPORTED, *_DESCRIBING)
    try:
        return kind.model_validate({k: v for k, v in data.items() if k not in ignored})
    except ValidationError as error:
        # Of a union, each part says why it does not fit: the deepest one came closest.
        found = max(error.errors(include_url=False), key=lambda e: len(e["loc"]))
    names = [str(part) for part in found["loc"] if not str(part).startswith(_UNION_PARTS)]
    name = ".".join(names)
    if found["type"] == "missing":
        message = f"{name} is required; got a body without it. Add it."
    elif found["type"] == "extra_forbidden":
        message = f"{name} is no option of this interface. Leave it out."
    else:
        rule = f"{name} should be {_KINDS[name]}" if name in _KINDS else found["msg"]
        rule = rule.replace("Input should", f"{name} should").replace(
            "List should", f"{name} should"
        )
        message = f"{rule}; got {_shortened(found['input'])}. Change it."
    raise RefusedError(message, status=422, param=names[0])


# What may be of several types.
_KINDS = {
    "prompt": f"a text, token ids, or a list of 1 to {MAX_CHOICES} texts",
    "stop": "a text, or a list of at most 16 texts",
}
_UNION_PARTS = ("str", "list[", "constrained-", "function-")  # how pydantic names a union's parts


def _is_any_of(value: Any, others: Sequence[Any]) -> bool:
    """Whether it is one of them; False is not 0, though Python says so, and 0.0 is."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in others
    )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- Answers --------------------------------------------------------------------------------------


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Answer:
    """The bodies that answer a request, whole or in pieces.

    Args:
        is_chat: whether it is a chat.
        model: the name that the model is served under.
    """

    def __init__(self, *, is_chat: bool, model: str) -> None:
        self._is_chat = is_chat
        prefix = "chatcmpl" if is_chat else "cmpl"
        self._common = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(
        self, choices: Sequence[tuple[str, str]], *, prompt_tokens: int, completion_tokens: int
    ) -> dict[str, Any]:
        """The body of an answer that is not streamed; a choice is a text and why it ended."""
        return {
            **self._common,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "choices": [
                self._choice(i, "message", text, reason) for i, (text, reason) in enumerate(choices)
            ],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
        }

    def piece(self, choice: int, text: str, reason: str | None = None) -> dict[str, Any]:
        """One event of a stream: more text of a choice, or why it ended."""
        return {
            **self._common,
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "choices": [self._choice(choice, "delta", text, reason)],
        }

    def _choice(self, index: int, key: str, text: str, reason: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        content = {key: message} if self._is_chat else {"text": text}
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}
