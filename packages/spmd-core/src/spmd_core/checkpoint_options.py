"""The options of `python -m spmd_core.checkpoint`, read without torch, jax and `checkpoint/`."""

import argparse
import sys

from spmd_core import command_line


def check_command_line() -> None:
    """Ends this process if it is `spmd-checkpoint` with --help or wrong arguments.

    Or `python -m spmd_core.checkpoint`: call it while `sys.argv[0]` is "-m", as it is until Python
    has imported the module to run.
    """
    if command_line.is_command("spmd_core.checkpoint"):
        parser().parse_args(sys.argv[1:])


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(
        prog="spmd-checkpoint",
        description="Looks at a folder of checkpoints, and converts to and from other files. "
        "Starts no accelerator.",
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what in (
        ("ls", "lists the whole steps: bytes on the disk, and when each was saved"),
        ("show", "lists a step's arrays: shape, dtype, sharding when it was saved, bytes"),
        ("verify", "reads every chunk and compares its checksum; exit code 1 if one is wrong"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("folder", help="the folder of all steps")
        if name != "ls":
            command.add_argument(
                "--step", type=_step, help="show: the newest, and verify: all, without this option"
            )
    what = (
        "converts a step to a file, or a file to a step, a chunk at a time: .safetensors for the "
        "tensors of one part, as those of the model; .pt, .pth or .bin for a torch file"
    )
    command = commands.add_parser("convert", help=what, description=what)
    command.add_argument("source", help="the folder of all steps; or a file, or a folder of them")
    command.add_argument("target", help="a file; or the folder of all steps")
    command.add_argument(
        "--step", type=_step, help="to a file: the newest, and from a file: 0, without this option"
    )
    command.add_argument(
        "--part",
        help="of the state; model, or all parts to a torch file, without this option",
    )
    return made


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"a step is a whole number from 0; got {text!r}. `ls` lists those that there are"
        )
    return int(text)
