"""Modules of PyTorch/XLA that this package lacks: importing one says what to use instead.

The import system asks this module's finder last, so it sees only names that no file provides.
"""

import sys
from collections.abc import Sequence
from types import ModuleType

_KERNELS = "Use torch.nn.functional.scaled_dot_product_attention, or spmd_core.call_jax with jax's."
_STABLEHLO = "Use spmd_core.debugging.stablehlo, which gives the text of a pending program."
_FSDP = "Use torch_xla.experimental.spmd_fully_sharded_data_parallel, or spmd_core.fully_shard."
_INSIDE = "It is a part inside PyTorch/XLA that has no counterpart here: remove the import."
_FILES = "Use fsspec and torch.save."

_INSTEAD = {
    "torch_xla._dynamo": 'Use torch.compile(function, backend="openxla").',
    "torch_xla._internal.c10d_registration": _INSIDE,
    "torch_xla._internal.custom_kernel": "Use the operators torch.ops.xla.dynamo_mark_sharding.",
    "torch_xla._internal.decomp_registration": _INSIDE,
    "torch_xla._internal.jax_workarounds": "Use spmd_core.call_jax.",
    "torch_xla._internal.neuron": "Use torch_xla.runtime.",
    "torch_xla._internal.pjrt": "Use torch_xla.launch and torch_xla.runtime.",
    "torch_xla._internal.rendezvous": 'Use init_method="xla://".',
    "torch_xla._internal.utils": _INSIDE,
    "torch_xla._patched_functions": _INSIDE,
    "torch_xla.core.xla_op_registry": "Write a jax function and call spmd_core.call_jax.",
    "torch_xla.debug.frame_parser_util": "Use spmd_core.debugging.explain_recompile.",
    "torch_xla.debug.metrics_compare_utils": "Compare spmd_core.metrics.counters().",
    "torch_xla.debug.metrics_saver": "Write torch_xla.debug.metrics.metrics_report() to a file.",
    "torch_xla.debug.model_comparator": "Compare tensor.cpu() of both runs.",
    "torch_xla.debug.graph_saver": "Set XLA_SAVE_TENSORS_FILE.",
    "torch_xla.distributed.fsdp.state_dict_utils": _FSDP,
    "torch_xla.distributed.fsdp.xla_flatten_params_wrapper": _FSDP,
    "torch_xla.distributed.fsdp.consolidate_sharded_ckpts": "Save state_dict(): it is whole.",
    "torch_xla.distributed.data_parallel": "Use spmd_data.MpDeviceLoader and a mesh.",
    "torch_xla.experimental.custom_kernel": _KERNELS,
    "torch_xla.experimental.deprecations": _INSIDE,
    "torch_xla.experimental.dynamo_mark_sharding": "Use torch.ops.xla.dynamo_mark_sharding.",
    "torch_xla.experimental.dynamo_set_buffer_donor": "Use torch.ops.xla.dynamo_set_buffer_donor_.",
    "torch_xla.experimental.gru": "Use torch.nn.GRU.",
    "torch_xla.experimental.mark_pattern_utils": _STABLEHLO,
    "torch_xla.experimental.pallas_kernels": _KERNELS,
    "torch_xla.experimental.pjrt_backend": "Use torch_xla.distributed.xla_backend.",
    "torch_xla.experimental.plugins": "Install the plugin as jax asks for it.",
    "torch_xla.experimental.quantized": "Quantize with torch's own operations.",
    "torch_xla.experimental.splash_attention": _KERNELS,
    "torch_xla.experimental.stablehlo_custom_call": "Call a jax function by spmd_core.call_jax.",
    "torch_xla.experimental.triton": "Write it in Pallas; call it by spmd_core.call_jax.",
    "torch_xla.experimental.unbounded_dynamism_export": _STABLEHLO,
    "torch_xla.experimental.xla_dynamic_reshape_ops": "Use reshape: sizes are constants here.",
    "torch_xla.experimental.xla_marker": _STABLEHLO,
    "torch_xla.experimental.xla_mlir_debuginfo": "Use spmd_core.debugging.source_lines().",
    "torch_xla.experimental.xla_quantized_matmul": "Use torch.matmul of the dequantized weight.",
    "torch_xla.stablehlo": _STABLEHLO,
    "torch_xla.tf_saved_model_integration": _STABLEHLO,
    "torch_xla.utils.cached_dataset": "Use torch.utils.data, or spmd_data's loaders.",
    "torch_xla.utils.closures": "Use torch_xla.core.xla_model.add_step_closure.",
    "torch_xla.utils.gcsfs": _FILES,
    "torch_xla.utils.keyd_queue": "Use queue.Queue.",
    "torch_xla.utils.serialization": "Use torch_xla.core.xla_model.save and torch.load.",
    "torch_xla.utils.tf_record_reader": "Read the records with TensorFlow, or convert them.",
    "torch_xla.version": "Read torch_xla.__version__.",
}


class AbsentModuleError(ModuleNotFoundError):
    """PyTorch/XLA has this module and this torch_xla does not; the message says what to use.

    Its `name` stays None: `from package import module` would replace an error with a name by its
    own.
    """


class _Finder:
    """Raises AbsentModuleError for the modules of the table and for modules inside them."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if fullname in _INSTEAD:
            raise AbsentModuleError(
                f"{fullname} is not in this torch_xla, which runs on spmd_core. "
                f"{_INSTEAD[fullname]}"
            )


def install() -> None:
    """Adds the finder after Python's own."""
    sys.meta_path.append(_Finder)
