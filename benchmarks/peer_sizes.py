"""Sizes of the runs of `peers.py`, in plain numbers without a framework."""

from dataclasses import dataclass

RECIPES = ("gpt2", "resnet", "llama")
SIZES_HELP = {
    "vocab": "tokens of the vocabulary",
    "seq": "tokens of a sequence",
    "batch": "sequences in a step, over all devices",
    "devices": "emulated devices, or processes over gloo",
}


@dataclass(frozen=True)
class Sizes:
    """Of the language models and their batches, and of the mesh."""

    preset: str = "tiny"
    vocab: int = 2048
    seq: int = 128
    batch: int = 8
    devices: int = 2

    def options(self) -> list[str]:
        """As options of this command."""
        named = {name: str(value) for name, value in vars(self).items()}
        return [word for name, value in named.items() for word in (f"--{name}", value)]
