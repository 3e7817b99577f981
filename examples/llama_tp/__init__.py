"""Llama by plans of tensor, sequence and loss parallelism: `python -m examples.llama_tp.train`."""
