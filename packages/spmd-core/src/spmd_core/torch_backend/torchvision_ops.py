"""Lets `import torchvision` work beside a torch for which its compiled operators were not built.

The only torchvision wheel for a torch may be one for CUDA, whose compiled operators cannot load beside the CPU build of torch. torchvision then
registers shape functions for two operators that do not exist, and its import fails; so does the import of every model of transformers, as that
imports torchvision where it is installed. Declaring the two operators is enough: models, transforms and datasets are Python, and torchvision itself
says what is missing when a compiled operator (`nms`, `roi_align`) is called. Not needed any more once torchvision leaves out the shape functions of
operators that it could not load.
"""

import importlib.util
import sys
from pathlib import Path

import torch

_SCHEMAS = tuple(
    f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")
)


def install() -> torch.library.Library | None:
    """Declares the operators without which torchvision cannot be imported; they live as long as the library that is returned.

    None, and nothing is done, where torchvision is absent, imported already or declared already, or able to load its compiled operators. It is not
    imported here.
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
            torch.ops.load_library(
                path
            )  # what torchvision does when it is imported, so nothing is loaded twice
        if hasattr(torch.ops.torchvision, "nms"):
            return None
    except OSError:
        pass  # built for another torch; this is the case that we are here for
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    return library
