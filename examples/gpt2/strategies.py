"""The strategies by name, with the mesh axes that each takes."""

MESH_AXES = ("data", "fsdp", "tensor")

# The mesh axes that a strategy takes.
STRATEGIES: dict[str, tuple[str, ...]] = {
    "spmd": MESH_AXES,
    "fsdp": ("data", "fsdp"),
    "ddp": ("data",),
    "pipeline": ("pipe", *MESH_AXES),
}
