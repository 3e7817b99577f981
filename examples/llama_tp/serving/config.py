"""The options of a server, and what they must satisfy.

Plain values: neither torch nor jax is imported, so that a wrong option is told at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from examples.training.knobs import KnobError, check_at_least, knob, parser_of

DEFAULT_LENGTH = 2048
DTYPES = ("auto", "fp32", "bf16")


@dataclass(frozen=True)
class ServeConfig:
    """All options of a server; `--help` prints a line for each."""

    model: str = knob("", "folder with config.json, safetensors and tokenizer files")
    mesh: str = knob("", "device mesh with the axis tensor, as in tensor=8; empty: one device")
    devices: int = knob(0, "number of emulated CPU devices; 0: the real ones")
    dtype: str = knob("auto", "of parameters and cache; auto: as config.json says", choices=DTYPES)
    slots: int = knob(16, "requests that are answered at the same time")
    max_length: int = knob(
        0, f"tokens of a prompt and its answer; 0: the model's positions, at most {DEFAULT_LENGTH}"
    )
    queue: int = knob(256, "requests that may wait for a slot")
    host: str = knob("127.0.0.1", "address to listen at; 0.0.0.0: every one of this machine")
    port: int = knob(8000, "port to listen at; 0: a free one")
    name: str = knob("", "the model's name to clients; empty: the folder's")
    grace_s: float = knob(10.0, "seconds that requests in flight may take after Ctrl-C")


def checked(config: ServeConfig) -> None:
    """Checks what needs neither the model nor a device.

    Raises:
        KnobError: an option is out of range.
    """
    if not config.model:
        raise KnobError(
            "--model names the folder of the model; got none. Add for instance --model llama/."
        )
    check_at_least(config, 1, ("slots", "queue"))
    check_at_least(config, 0, ("devices", "max_length", "port", "grace_s"))
    if config.devices > 1 and not config.mesh:
        raise KnobError(
            f"without a mesh one device computes; got --devices {config.devices} and no --mesh. "
            f"Add for instance --mesh tensor={config.devices}."
        )


def config_from(argv: Sequence[str] | None, *, usage: str | None = None) -> ServeConfig:
    """The command line as a configuration.

    Args:
        argv: without the program; None: this process's.
        usage: stands on top of --help.
    """
    parser = parser_of(ServeConfig, module="examples.llama_tp.serve", usage=usage)
    return ServeConfig(**vars(parser.parse_args(argv)))
