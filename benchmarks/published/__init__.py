"""The published plots, measured again: GPT-2's speed and memory, ResNet's batch, Llama, overheads.

`python -m benchmarks.published --help` runs them all; each figure has a file, which runs alone.
"""
