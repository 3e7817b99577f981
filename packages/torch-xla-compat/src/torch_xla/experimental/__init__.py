"""Names that torch_xla keeps under `experimental`: eager mode, FSDP, older paths of modules."""

from torch_xla.experimental.eager import eager_mode as eager_mode
from torch_xla.experimental.eager import eager_mode_context as eager_mode_context
from torch_xla.experimental.eager import is_eager_mode as is_eager_mode
