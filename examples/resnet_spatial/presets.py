"""The networks by name, and the names of mesh axes, in plain values without a framework."""

# Widths of the stages of the small networks, for images of 32 pixels and more.
SMALL = {"smoke": (8, 16), "small": (16, 32, 64)}
MODELS = (*SMALL, "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
MESH_AXES = ("data", "height", "width")
