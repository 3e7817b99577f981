"""The values that options may name, without a framework: a command line is read at once."""

# What a block keeps between forward and backward, beside its input: the results of operations whose
# name contains one of these. "offload" keeps the input itself in the memory of the host.
REMAT_POLICIES: dict[str, tuple[str, ...]] = {
    "full": (),
    "offload": (),
    "products": ("linear", "mm"),
    "attention": ("attention",),
}
PYTHON_STDLIB = "python-stdlib"
TEXT_CACHE_DIR = "~/.cache/spmd/text"
RESUME_AUTO = "auto"  # of --resume: the newest file of --checkpoint, if there is one
