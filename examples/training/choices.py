"""The values that options may name, without a framework: a command line is read at once."""

# What a block keeps between forward and backward, beside its input: the results of operations whose
# name contains one of these. "offload" keeps the input itself in the memory of the host.
REMAT_POLICIES: dict[str, tuple[str, ...]] = {
    "full": (),
    "offload": (),
    "products": ("linear", "mm"),
    "attention": ("attention",),
}
# Highest values: beyond, a run would hang or take all memory before it says what is wrong.
MOST_DEVICES = 2048  # that `spmd.simulate` emulates
MOST_WORKERS = 256  # threads or processes that read
MOST_TOKENS = 2**24  # of a sequence or a vocabulary
MOST_ROWS = 2**20  # of a batch, or classes
PYTHON_STDLIB = "python-stdlib"
TEXT_CACHE_DIR = "~/.cache/spmd/text"
MESH_AUTO = "auto"  # of --mesh: found for the first step, with the shardings
RESUME_AUTO = "auto"  # of --resume: the newest step in --checkpoint, if there is one
SAVE_EVERY = 100  # steps, unless --save-every says otherwise
