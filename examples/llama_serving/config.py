"""The options of a server, and what they must satisfy.

Plain values: neither torch nor jax is imported, so that a wrong option is reported at once.
"""

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from examples.training.choices import MOST_DEVICES, MOST_ROWS, MOST_TOKENS
from examples.training.knobs import KnobError, check_ranges, knob, parser_of
from examples.training.mesh_sizes import Sizes, mesh_sizes, num_devices

DEFAULT_LENGTH = 2048
KEY_VARIABLE = "LLAMA_API_KEY"
DTYPES = ("auto", "fp32", "bf16")
# Of a client's header Host, without a port. The guard takes every address.
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True)
class ServeConfig:
    """All options of a server; `--help` prints a line for each."""

    model: str = knob(
        "", "folder with config.json, safetensors and tokenizer files, or of a run's --checkpoint"
    )
    mesh: str = knob("", "device mesh with the axis tensor, as in tensor=8; empty: one device")
    devices: int = knob(0, "number of emulated CPU devices; 0: the real ones", most=MOST_DEVICES)
    dtype: str = knob("auto", "of parameters and cache; auto: as config.json says", choices=DTYPES)
    slots: int = knob(16, "requests that are answered at the same time", least=1, most=4096)
    max_length: int = knob(
        0,
        f"tokens of a prompt and its answer; 0: the model's positions, at most {DEFAULT_LENGTH}",
        most=MOST_TOKENS,
    )
    queue: int = knob(256, "requests that may wait for a slot", least=1, most=MOST_ROWS)
    capture: bool = knob(
        True,
        "run the steps' programs without recording them",
        action=argparse.BooleanOptionalAction,
    )
    scan: bool = knob(
        False,
        "run the layers as one loop of the program: faster to compile and to start a step; CPUs "
        "copy each layer's weights in it",
        action=argparse.BooleanOptionalAction,
    )
    host: str = knob("127.0.0.1", "address to listen at; 0.0.0.0: every one of this machine")
    port: int = knob(8000, "port to listen at; 0: a free one", most=65535)
    api_key: str = knob(
        "", f"clients must send it; other users see it here, and not in the variable {KEY_VARIABLE}"
    )
    without_key: bool = knob(
        False, "let everyone who reaches a public --host ask", type=bool, action="store_true"
    )
    allow_host: tuple[str, ...] = knob(
        (), "names by which clients call it, beside localhost and addresses", type=str, nargs="+"
    )
    allow_origin: tuple[str, ...] = knob(
        (), "other web pages that may ask, as in https://chat.example; *: all", type=str, nargs="+"
    )
    connections: int = knob(1024, "HTTP connections at the same time", least=1, most=65535)
    name: str = knob("", "the model's name to clients; empty: the folder's")
    grace_s: float = knob(10.0, "seconds that requests in flight may take after Ctrl-C", most=86400)


def checked(config: ServeConfig) -> None:
    """Checks what needs neither the model nor a device.

    Raises:
        KnobError: an option is out of range.
    """
    if not config.model:
        raise KnobError(
            "--model names the folder of the model; got none. Add for instance --model llama/."
        )
    check_ranges(config)
    if not Path(config.model).is_dir():
        raise KnobError(
            f"--model names the folder of the model; {config.model!r} is no folder in {Path.cwd()}"
            ". Correct its path."
        )
    if config.devices > 1 and not config.mesh:
        raise KnobError(
            f"without a mesh one device computes; got --devices {config.devices} and no --mesh. "
            f"Add for instance --mesh tensor={config.devices}."
        )
    if config.mesh:
        sizes = mesh_sizes(config.mesh, num_emulated=config.devices, example="tensor")
        check_axes(config.mesh, sizes)
    if not config.host:
        raise KnobError(
            "--host names an address of this machine; got an empty one. Leave it out for "
            "127.0.0.1, or pass 0.0.0.0 for every one."
        )
    for name in config.allow_host:
        if not _HOST_NAME.fullmatch(name):
            raise KnobError(
                "--allow-host takes a host's name alone, as in llama.example; got "
                f"{name!r}. Leave out a scheme, a port and a path."
            )
    for origin in config.allow_origin:
        if not _is_origin(origin):
            raise KnobError(
                "--allow-origin takes a scheme and a host, as browsers send them, or *; got "
                f"{origin!r}. Pass for instance https://chat.example, without a path."
            )
    if api_key(config) and config.without_key:
        given = "--api-key" if config.api_key else f"the variable {KEY_VARIABLE}"
        raise KnobError(
            f"--without-key lets everyone ask; got a key in {given} too. Leave one of them out."
        )


def check_axes(text: str, sizes: Sizes) -> None:
    """Raises KnobError if a mesh has another axis than tensor."""
    if [*sizes] != ["tensor"]:
        raise KnobError(
            f"a server splits over one axis, tensor; got {text!r}. Pass for instance --mesh "
            f"tensor={'*' if None in sizes.values() else num_devices(sizes)}."
        )


def api_key(config: ServeConfig) -> str:
    """What clients must send: the option's value, or the environment's; empty: nothing.

    Raises:
        KnobError: it cannot be sent in a header.
    """
    key = config.api_key or os.environ.get(KEY_VARIABLE, "")
    if not all("!" <= character <= "~" for character in key):
        raise KnobError(
            "an API key must be of ASCII's letters, digits and signs, without spaces; got one that "
            "is not. Pass another one."
        )
    return key


def _is_origin(text: str) -> bool:
    """Whether a text is a scheme and a host, as browsers send them, or "*"."""
    if text == "*":
        return True
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return bool(parts.scheme and parts.netloc) and text == f"{parts.scheme}://{parts.netloc}"


def config_from(argv: Sequence[str] | None, *, usage: str | None = None) -> ServeConfig:
    """The command line as a configuration.

    Args:
        argv: without the program; None: this process's.
        usage: stands on top of --help.
    """
    parser = parser_of(ServeConfig, module="examples.llama_serving.serve", usage=usage)
    return ServeConfig(**vars(parser.parse_args(argv)))
