"""What clients send and get: the requests of OpenAI's interface, checked, and its answers."""

import json
import reprlib
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from examples.llama_serving.sampling import SamplingOptions

MAX_CHOICES = 16
MAX_STOPS = 16
LEAST_TEMPERATURE = 1e-5  # below it, logits that are divided by it leave float32's range
_INT64 = 2**63
_MAX_DIGITS = 1000  # of an integer
# Options that are known and not supported, with the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
# The same for messages: what clients send back of an assistant's earlier answer.
_UNSUPPORTED_OF_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "tool_calls": (None, []),
}


class RefusedError(ValueError):
    """A request is refused.

    Attributes:
        status: of HTTP.
        param: the option that it is about.
        code: identifies the kind of error for clients.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def _mismatch(rule: str, got: Any, *, at: Sequence[int | str] = ()) -> PydanticCustomError:
    """A value that is not as `rule` says, at a place within the validated one."""
    return PydanticCustomError("mismatch", "mismatch", {"rule": rule, "got": got, "at": tuple(at)})


_PROMPT = f"should be a text, token ids, or a list of 1 to {MAX_CHOICES} of them"


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_prompts(value: Any) -> list[str | list[int]]:
    """Each prompt of a text, token ids, or a list of texts or of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise _mismatch(_PROMPT, value)
    if _is_token_id(value[0]):
        return [_as_token_ids(value, at=())]
    if len(value) > MAX_CHOICES:
        raise _mismatch(_PROMPT, value)
    if isinstance(value[0], str):
        for i, part in enumerate(value):
            if not isinstance(part, str):
                raise _mismatch("should be a text, as the first one is", part, at=(i,))
        return list(value)
    if isinstance(value[0], list):
        return [_as_token_ids(part, at=(i,)) for i, part in enumerate(value)]
    raise _mismatch(_PROMPT, value)


def _as_token_ids(value: Any, *, at: Sequence[int]) -> list[int]:
    if not isinstance(value, list) or not value:
        raise _mismatch("should be a list of token ids", value, at=at)
    for i, part in enumerate(value):
        if not _is_token_id(part):
            raise _mismatch("should be a token id, an integer", part, at=(*at, i))
    return value


def _as_stops(value: Any) -> tuple[str, ...]:
    """The strings that end a text, of one string, a list of them, or null."""
    given = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(given, list) or len(given) > MAX_STOPS:
        raise _mismatch(f"should be a text, or a list of at most {MAX_STOPS} texts", value)
    for i, part in enumerate(given):
        at = () if isinstance(value, str) else (i,)
        if not isinstance(part, str):
            raise _mismatch("should be a text", part, at=at)
        if not part:
            raise _mismatch("should not be empty", part, at=at)
    return tuple(given)


def _as_text(value: Any) -> str:
    """A message's text, of a text or a list of parts, each of which begins a line."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _mismatch("should be a text or a list of text parts", value)
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            rule = 'should be {"type": "text", "text": ...}, as the model reads nothing but text'
            raise _mismatch(rule, part, at=(i,))
        if not isinstance(part.get("text"), str):
            raise _mismatch("should be a text", part.get("text"), at=(i, "text"))
        unknown = part.keys() - {"type", "text", "cache_control", "annotations"}
        if unknown:
            raise _mismatch("should have a type and a text alone", part, at=(i,))
    return "\n".join(part["text"] for part in value)


class StreamOptions(BaseModel):
    """What a stream has beside the text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Options(BaseModel):
    """What both kinds of requests share."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    default_max_tokens: ClassVar[int | None] = None  # None: as many as fit

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=_INT64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=_INT64)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stops: Annotated[tuple[str, ...], PlainValidator(_as_stops), Field(alias="stop")] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # These describe the request, and change nothing about the answer.
    user: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """The option that limits the tokens of an answer, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends in the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        """Continuations of each prompt."""
        return self.n or 1

    def sampling(self, choice: int) -> SamplingOptions:
        """How the tokens of a choice are chosen.

        The temperature is 1 where none is given, as in OpenAI's interface; below
        `LEAST_TEMPERATURE` it is 0. Choice `i` has the seed `seed + i`, and a random one where none
        is given.
        """
        seed = secrets.randbits(62) if self.seed is None else self.seed + choice
        temperature = 1.0 if self.temperature is None else float(self.temperature)
        return SamplingOptions(
            temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else float(self.top_p),
            seed=(seed + _INT64) % (2 * _INT64) - _INT64,
        )


class CompletionRequest(_Options):
    """The body of `/v1/completions`; a prompt is a text or token ids, and there may be several."""

    default_max_tokens: ClassVar[int | None] = 16

    prompts: Annotated[list[str | list[int]], PlainValidator(_as_prompts), Field(alias="prompt")]


class Message(BaseModel):
    """A message of a conversation; `name` is for the model's template."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_as_text)]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """What a chat template reads."""
        return self.model_dump(exclude_none=True)


class ChatRequest(_Options):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=_INT64)] | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """The option that limits the tokens of an answer, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().limit


def parsed(kind: type[_Options], data: Any) -> Any:
    """A request from decoded JSON.

    Raises:
        RefusedError: with the rule, what was got, and what to do; its code is one of OpenAI's.
    """
    if not isinstance(data, dict):
        raise RefusedError(
            f"the body must be a JSON object; got {shortened(data)}. Send for instance "
            '{"prompt": "Once"}.'
        )
    given = _without_neutral(data, _UNSUPPORTED)
    if isinstance(given.get("messages"), list):
        given["messages"] = [
            _without_neutral(message, _UNSUPPORTED_OF_MESSAGES, prefix=f"messages.{i}.")
            if isinstance(message, dict)
            else message
            for i, message in enumerate(given["messages"])
        ]
    try:
        found = kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from None
    if found.stream_options is not None and not found.stream:
        raise RefusedError(
            "stream_options is for streams alone; got it without stream. Leave it out, or add "
            '"stream": true.',
            param="stream_options",
            code="invalid_value",
        )
    name, number = found.limit
    if found.max_tokens not in (None, number):
        raise RefusedError(
            f"{name} and max_tokens are names of one option; got {number} and {found.max_tokens}. "
            "Leave out max_tokens.",
            param=name,
            code="invalid_value",
        )
    return found


def decoded(body: bytes) -> Any:
    """The value of a JSON text whose objects have each name once.

    Raises:
        RefusedError: it is none.
    """
    try:
        data = json.loads(
            body, parse_constant=_no_number, parse_int=_integer, object_pairs_hook=_object
        )
        json.dumps(data, ensure_ascii=False).encode()  # fails for an escape of a lone surrogate
    except RefusedError:  # which is a ValueError, too
        raise
    except RecursionError:
        error: object = "its lists and objects are too deep inside one another"
    except ValueError as found:
        error = found
    else:
        return data
    raise RefusedError(f"the body must be JSON; got something else: {error}. Correct it.")


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:  # beyond a few thousand, Python refuses it in words of its own
        raise ValueError(f"a number has at most {_MAX_DIGITS} digits, and {_cut(text)} has more")
    return int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
        raise RefusedError(
            f"an object has each name once; got {_cut(twice)!r} twice. Leave one of them out.",
            param=_cut(twice),
            code="invalid_value",
        )
    return found


def _without_neutral(
    data: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]], *, prefix: str = ""
) -> dict[str, Any]:
    """The options without the unsupported ones, all of which must ask for nothing."""
    for name, neutral in unsupported.items():
        if name in data and not _is_any_of(data[name], neutral):
            raise RefusedError(
                f"{prefix}{name} is not supported by this server; got {shortened(data[name])}. "
                "Leave it out.",
                param=f"{prefix}{name}",
                code="unsupported_parameter",
            )
    return {name: value for name, value in data.items() if name not in unsupported}


# Replaces the messages of pydantic that name Python's types.
_RULES = {
    "dict_type": "should be an object",
    "model_type": "should be an object",
    "list_type": "should be a list",
    "string_type": "should be a text",
    "bool_type": "should be true or false",
    "int_type": "should be an integer",
    "float_type": "should be a number",
}


def _refusal(found: Mapping[str, Any]) -> RefusedError:
    """What is wrong with an option. No model has a union, so a location is a path in the JSON."""
    kind, path, rule, got = found["type"], tuple(found["loc"]), found["msg"], found["input"]
    if kind == "mismatch":
        rule, got = found["ctx"]["rule"], found["ctx"]["got"]
        path += found["ctx"]["at"]
    name = _cut(".".join(map(str, path))) or "''"  # JSON has a name without letters, too
    if kind == "missing":
        message = f"{name} is required; got a body without it. Add it."
        code = "missing_required_parameter"
    elif kind == "extra_forbidden":
        message = f"{name} is no option of this interface. Leave it out."
        code = "unknown_parameter"
    else:
        rule = _RULES.get(kind, rule)
        rule = f"should {rule.partition('should ')[2]}" if "should " in rule else f"fails: {rule}"
        message = f"{name} {rule}; got {shortened(got)}. Change it."
        code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return RefusedError(message, param=name, code=code)


def _is_any_of(value: Any, others: Sequence[Any]) -> bool:
    """Whether it is one of them; False is not 0, though Python says so, and 0.0 is."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in others
    )


_REPR = reprlib.Repr()  # bounds depth and the numbers of items
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 76


def shortened(value: Any) -> str:
    """A value of decoded JSON in at most 80 characters, however deep or long it is."""
    return _cut(_REPR.repr(value))


def _cut(text: str) -> str:
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
        with_usage: whether a stream has the numbers of tokens; each event then has a place for
            them.
    """

    def __init__(self, *, is_chat: bool, model: str, with_usage: bool = False) -> None:
        self._is_chat, self._with_usage = is_chat, with_usage
        self._begun: set[int] = set()  # the choices of which a piece was made
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
                self._choice(i, {"message": {"role": "assistant", "content": text}}, text, reason)
                for i, (text, reason) in enumerate(choices)
            ],
            "usage": _usage(prompt_tokens, completion_tokens),
        }

    def piece(self, choice: int, text: str, reason: str | None = None) -> dict[str, Any]:
        """One event of a stream: more text of a choice, or why it ended.

        The first one of a chat's choice says the role: clients append what the others repeat.
        """
        delta = {} if reason is not None and not text else {"content": text}
        if choice not in self._begun:
            self._begun.add(choice)
            delta = {"role": "assistant", "content": text}
        return self._event([self._choice(choice, {"delta": delta}, text, reason)], usage=None)

    def usage(self, *, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        """The last event of a stream that has the numbers of tokens; it has no choices."""
        return self._event([], usage=_usage(prompt_tokens, completion_tokens))

    def _event(self, choices: list[Any], *, usage: dict[str, int] | None) -> dict[str, Any]:
        return {
            **self._common,
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "choices": choices,
            **({"usage": usage} if self._with_usage else {}),
        }

    def _choice(
        self, index: int, message: dict[str, Any], text: str, reason: str | None
    ) -> dict[str, Any]:
        content = message if self._is_chat else {"text": text}
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
