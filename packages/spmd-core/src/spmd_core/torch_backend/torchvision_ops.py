"""Lets `import torchvision` work if its compiled operators were built for another torch.

The only torchvision wheel for a torch version may be one for CUDA, whose compiled operators cannot
load with the CPU build of torch. torchvision then registers shape functions for two operators that
do not exist, and its import fails. The import of all models of transformers fails with it, as
transformers imports torchvision where it is installed. Declaring the two operators is enough:
models, transforms and datasets are Python, and torchvision itself reports what is missing when a
compiled operator (`nms`, `roi_align`) is called. No longer needed once torchvision leaves out the
shape functions of operators that it could not load.
"""

import importlib.util
import sys
from pathlib import Path

import torch

_SCHEMAS = tuple(
    f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")
)


def install() -> torch.library.Library | None:
    """Declares the operators that the import of torchvision needs, if they are missing.

    Does not import torchvision.

    Returns:
        The library that keeps the declarations. None, with nothing declared, if torchvision is
        absent or already imported, or if its operators are declared or can be loaded.
    """
    if (
        "torchvision" in sys.modules
        or torch.version.cuda is not None
        or hasattr(torch.ops.torchvision, "nms")
    ):
        return None
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    try:
        for path in Path(spec.origin).parent.glob("_C*"):
            # torchvision's import does the same, so nothing is loaded twice.
            torch.ops.load_library(path)
        if hasattr(torch.ops.torchvision, "nms"):
            return None
    except OSError:
        pass  # built for another torch: the case that this function is for
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    return library
