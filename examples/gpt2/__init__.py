"""GPT-2, trained from scratch on real text over a device mesh: `python -m examples.gpt2.train`."""
