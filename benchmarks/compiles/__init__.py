"""Which operations compile for a TPU, and lower for CUDA, on a machine that has neither?"""
