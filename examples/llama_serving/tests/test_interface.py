"""Requests of any JSON are taken or refused in OpenAI's way, and never fail inside."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from examples.llama_serving.interface import (
    _UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    RefusedError,
    parsed,
)

CODES = {
    "invalid_type",
    "invalid_value",
    "missing_required_parameter",
    "unknown_parameter",
    "unsupported_parameter",
    None,
}
# Names of options, names that look like those of pydantic's inner parts, and others.
NAMES = [
    *CompletionRequest.model_fields,
    *ChatRequest.model_fields,
    *("prompt", "stop", "logprobs", "tools", "response_format", "logit_bias", "model_config"),
    *("str", "string", "list[int]", "function-after", "constrained-int", "0", "", "tools.0"),
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-(2**63), 2**63, 10**400, 0, 1, 16]),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["user", "assistant", "text", "auto", "none"]),
)
KEYS = st.sampled_from([*NAMES, "role", "content", "type", "text", "include_usage"]) | st.text(
    max_size=4
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
RIGHT_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
FORBIDDEN = (
    "max_completion_tokens",
    "unknown_parameter",
    "max_completion_tokens is no option of this interface. Leave it out.",
)
RIGHT: dict[str, Any] = {
    "prompt": "the cat",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}],
}


def outcome(kind: Any, data: Any) -> RefusedError | None:
    found: Any = None
    error: RefusedError | None = None
    try:
        found = parsed(kind, data)
    except RefusedError as refused:
        error = refused
    if error is not None:
        assert error.status == 400 and error.code in CODES
        assert len(str(error)) < 400 and str(error).endswith((".", '"}.'))
        return error
    # What was taken can be used.
    assert found.num_choices >= 1 and all(found.stops)
    assert -(2**63) <= found.sampling(15).seed < 2**63
    assert isinstance(found.with_usage, bool)
    return None


# Other work on the machine makes generating slow.
ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@ANY_SPEED
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4), st.sampled_from(["", "right"]))
@example({"stream": "yes"}, "right")
@example({"string": 1, "list[int]": 2, "function-before": []}, "")
@example({"stop": [[[]]]}, "right")
@example({"": None}, "right")
def test_any_json_is_taken_or_refused(data: dict[str, Any], base: str) -> None:
    for kind, name in ((CompletionRequest, "prompt"), (ChatRequest, "messages")):
        given_ = {name: RIGHT[name]} | data if base else data
        error = outcome(kind, given_)
        if error is not None and error.code == "unknown_parameter":
            assert error.param


@ANY_SPEED
@given(JSON)
def test_any_value_of_an_option(value: Any) -> None:
    outcome(CompletionRequest, value)
    outcome(CompletionRequest, {"prompt": value})
    outcome(ChatRequest, {"messages": value})
    outcome(ChatRequest, {"messages": [{"role": "user", "content": value}]})
    outcome(ChatRequest, RIGHT | {"stream_options": value, "stream": True})


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def test_a_deep_value_is_cut() -> None:
    for name in ("prompt", "stop", "metadata", "tools", "messages"):
        error = outcome(CompletionRequest, {"prompt": "a", name: nested(900)})
        assert error is not None and ("..." in str(error) or name == "messages")


@pytest.mark.parametrize(
    ("data", "param", "code", "message"),
    [
        ({"stream": "yes"}, "stream", "invalid_type", "stream should be true or false; got 'yes'"),
        ({"strict": 1}, "strict", "unknown_parameter", "strict is no option of this interface."),
        ({"prompt": [[1], ["a"]]}, "prompt.1.0", "invalid_value", "should be a token id, an int"),
        ({"prompt": ["a", 1]}, "prompt.1", "invalid_value", "should be a text, as the first one"),
        ({"prompt": [[1], []]}, "prompt.1", "invalid_value", "should be a list of token ids; got"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_type", "metadata.a should be a text; got"),
        ({"user": 5}, "user", "invalid_type", "user should be a text; got 5. Change it."),
        ({"store": True}, "store", "unsupported_parameter", "store is not supported by this"),
        ({"max_tokens": 2, "max_completion_tokens": 2}, *FORBIDDEN),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options",
            "invalid_value",
            'stream_options is for streams alone; got it without stream. Leave it out, or add "st',
        ),
        (
            {"stream": True, "stream_options": {"usage": True}},
            "stream_options.usage",
            "unknown_parameter",
            "stream_options.usage is no option of this interface. Leave it out.",
        ),
    ],
)
def test_a_refusal_names_the_place(
    data: dict[str, Any], param: str, code: str, message: str
) -> None:
    error = outcome(CompletionRequest, {"prompt": "a"} | data)
    assert error is not None
    assert (error.param, error.code, message in str(error)) == (param, code, True), error


@pytest.mark.parametrize(
    ("message", "param", "rule"),
    [
        ({"content": None}, "messages.0.content", "should be a text or a list of text parts; got"),
        ({"content": []}, "messages.0.content", "should be a text or a list of text parts; got"),
        (
            {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages.0.content.0",
            'should be {"type": "text", "text": ...}, as the model reads nothing but text; got',
        ),
        ({"content": [{"type": "text"}]}, "messages.0.content.0.text", "should be a text; got Non"),
        ({"tool_calls": [{}]}, "messages.0.tool_calls", "messages.0.tool_calls is not supported"),
    ],
)
def test_a_refusal_of_a_message_names_the_place(
    message: dict[str, Any], param: str, rule: str
) -> None:
    error = outcome(ChatRequest, {"messages": [{"role": "user", "content": "a"} | message]})
    assert error is not None and error.param == param and rule in str(error), error


def test_one_option_with_two_names_has_one_value() -> None:
    error = outcome(ChatRequest, RIGHT_CHAT | {"max_tokens": 8, "max_completion_tokens": 2})
    assert error is not None and error.param == "max_completion_tokens"
    assert str(error) == (
        "max_completion_tokens and max_tokens are names of one option; got 2 and 8. Leave out "
        "max_tokens."
    )
    for given_ in ({"max_tokens": 2}, {"max_completion_tokens": 2, "max_tokens": None}):
        assert parsed(ChatRequest, RIGHT_CHAT | given_).limit[1] == 2
        assert parsed(ChatRequest, RIGHT_CHAT | {"max_completion_tokens": 2} | given_)


# Values of every kind that a field may not have; what is right for one field is left out there.
WRONG: list[Any] = [
    *("", "yes", "1", "NaN", "auto?", "\0", "x" * 10_000),
    *(-1, 0, 3, 17, 2.5, 1e308, float("inf"), float("nan"), 2**63, -(2**63) - 1, 10**400),
    *(True, False, [], [[]], [None], [True], [1.5], ["a", 1], {}, {"a": 1}, {"": None}, [{}]),
    [["a"]] * 17,
]
TAKEN: dict[str, Callable[[Any], bool]] = {
    "model": lambda v: isinstance(v, str),  # which model it is, the app knows
    "max_tokens": lambda v: v in (3, 17),
    "max_completion_tokens": lambda v: v in (3, 17),
    "temperature": lambda v: v == 0,
    "top_p": lambda v: False,
    "top_k": lambda v: v in (0, 3, 17),
    "seed": lambda v: v in (-1, 0, 3, 17),
    "n": lambda v: v == 3,
    "stop": lambda v: v == [] or (isinstance(v, str) and v != ""),
    "stream": lambda v: False,
    "stream_options": lambda v: v == {},
    "user": lambda v: isinstance(v, str),
    "metadata": lambda v: v == {},
    "prompt_cache_key": lambda v: isinstance(v, str),
    "prompt_cache_retention": lambda v: isinstance(v, str),
    "safety_identifier": lambda v: isinstance(v, str),
    "prompt": lambda v: isinstance(v, str),
    "messages": lambda v: False,
    "frequency_penalty": lambda v: v == 0,
    "presence_penalty": lambda v: v == 0,
    "top_logprobs": lambda v: v == 0,
    "functions": lambda v: v == [],
    "tools": lambda v: v == [],
    "logit_bias": lambda v: v == {},
    "suffix": lambda v: v == "",
}
SWITCHES = {"stream", "parallel_tool_calls", "echo", "logprobs", "store"}


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_every_field_refuses_every_wrong_value_by_its_name(kind: Any) -> None:
    base = {"prompt": "a"} if kind is CompletionRequest else RIGHT_CHAT
    names = {field.alias or name for name, field in kind.model_fields.items()} | {*_UNSUPPORTED}
    refused = 0
    for name in sorted(names):
        for value in WRONG:
            if isinstance(value, bool):
                neutral = name in SWITCHES and (value is False or name == "parallel_tool_calls")
                takes = name == "stream" or neutral
            else:
                takes = TAKEN.get(name, lambda v: False)(value)
            around = {"stream": True} if name == "stream_options" else {}
            error = outcome(kind, base | around | {name: value})
            assert (error is None) == takes, (name, value, error)
            if error is not None:
                assert (error.param or "").partition(".")[0] == name, (name, value, error)
                says = "; got " in str(error) or error.code == "unknown_parameter"
                assert str(error).startswith(name) and says, error
                refused += 1
    assert refused > 700


def test_every_field_of_a_message_refuses_every_wrong_value_by_its_name() -> None:
    for name in ("role", "content", "name", "tool_calls", "refusal", "annotations", "weight"):
        for value in WRONG:
            if name in ("content", "name") and isinstance(value, str):
                continue
            message = {"role": "user", "content": "a"} | {name: value}
            error = outcome(ChatRequest, {"messages": [message]})
            if name in ("annotations", "tool_calls") and value == []:
                assert error is None
                continue
            assert error is not None, (name, value)
            assert (error.param or "").startswith(f"messages.0.{name}"), (name, value, error)


def test_a_temperature_that_divides_logits_out_of_range_is_0() -> None:
    for given_, taken in ((1e-30, 0.0), (1e-4, 1e-4), (0, 0.0), (None, 1.0)):
        asked = parsed(CompletionRequest, {"prompt": "a", "temperature": given_})
        assert asked.sampling(0).temperature == taken
