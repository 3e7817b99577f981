"""Tests that each name is at its path and has torch_xla 2.9's parameters.

Compared are names, order, defaults, and which are keyword-only.
"""

import importlib
import inspect

import pytest

import torch_xla
from torch_xla.distributed.spmd import HybridMesh
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

SIGNATURES = {
    "torch_xla": {
        "device": "(index=None)",
        "devices": "()",
        "real_devices": "()",
        "device_count": "()",
        "sync": "(wait=False, reset_scope=True)",
        "step": "()",
        "compile": (  # `capture` is ours
            "(f=None, full_graph=False, name=None, max_different_graphs=None, "
            "custom_compile_options=None, *, capture=False)"
        ),
        "set_custom_compile_options": "(options)",
        "manual_seed": "(seed, device=None)",
        "launch": "(fn, args=(), start_method='spawn', debug_single_process=False)",
    },
    "torch_xla.distributed.spmd": {
        "Mesh": "(device_ids, mesh_shape, axis_names=None)",
        "mark_sharding": "(t, mesh, partition_spec)",
        "annotate_custom_sharding": "(t, mesh, partition_spec)",
        "mark_sharding_with_gradients": "(t, mesh, partition_spec)",
        "clear_sharding": "(t)",
        "enable_manual_sharding": "(t, partition_spec, *, mesh=None)",
        "disable_manual_sharding": "(t, partition_spec, full_shape, *, mesh=None)",
        "_mark_manual_sharding": "(t)",
        "shard_as": "(a, b)",
        "set_global_mesh": "(mesh)",
        "get_global_mesh": "()",
        "get_1d_mesh": "(axis_name=None)",
        "wrap_as_sharded_tensor": "(t, mesh_shape=None, partition_spec=None)",
        "unwrap_sharded_tensor": "(t)",
        "wrap_if_sharded": "(x)",
        "ShardingSpec": "(mesh, partition_spec, minibatch=False)",
        "XLAShard": "(data, indices, shard_device, replica_id)",
        "XLAShardedTensor": "(elem, mesh_shape=None, partition_spec=None, requires_grad=False)",
        "xla_patched_nn_linear_forward": "(m, input)",
        "apply_xla_patch_to_nn_linear": "(module)",
        "apply_backward_optimization_barrier": "(m)",
        "convert_to_xla_mesh": "(dt_mesh)",
        "convert_to_xla_partition_spec": "(tensor, placements)",
        "xla_distribute_tensor": "(tensor, device_mesh, placements=None)",
        "xla_distribute_module": (
            "(module, device_mesh=None, partition_fn=None, input_fn=None, output_fn=None)"
        ),
    },
    "torch_xla.distributed.spmd.debugging": {
        "visualize_sharding": "(sharding, use_color=True, scale=1.0, min_width=9, max_width=80)",
        "visualize_tensor_sharding": "(t, **kwargs)",
        "construct_v1_sharding_str": "(t)",
    },
    "torch_xla.runtime": {
        "set_device_type": "(pjrt_device)",
        "device_type": "()",
        "is_bf16_supported": "()",
        "local_process_count": "()",
        "global_device_count": "()",
        "world_size": "()",
        "local_device_count": "()",
        "addressable_device_count": "()",
        "global_ordinal": "()",
        "local_ordinal": "()",
        "process_index": "()",
        "process_count": "()",
        "host_index": "()",
        "runtime_device_attributes": "(device)",
        "global_runtime_device_attributes": "()",
        "global_runtime_device_count": "()",
        "addressable_runtime_device_count": "()",
        "use_spmd": "(auto=False)",
        "is_spmd": "()",
        "get_master_ip": "()",
        "initialize_cache": "(path, readonly=False)",
        "get_num_cached_compilation_graph": "()",
    },
    "torch_xla.core.xla_model": {
        "is_xla_tensor": "(tensor)",
        "xla_device": "(n=None, devkind=None)",
        "is_master_ordinal": "(local=True)",
        "unlazy": "(tensors)",
        "mark_step": "(wait=False, reset_scope=True)",
        "add_step_closure": "(closure, args=(), run_async=False)",
        "get_stablehlo": "(tensors=None)",
        "get_stablehlo_bytecode": "(tensors=None)",
        "send_cpu_data_to_device": "(datas, device, input_sharding=None)",
        "save": "(data, file_or_path, master_only=True, global_master=False)",
        "set_rng_state": "(seed, device=None)",
        "get_rng_state": "(device=None)",
        "fork_rng": "(device=None, enabled=True)",
        "get_memory_info": "(device=None)",
        "optimization_barrier_": "(tensors)",
        "all_reduce": "(reduce_type, inputs, scale=1.0, groups=None, pin_layout=True)",
        "all_gather": "(value, dim=0, groups=None, output=None, pin_layout=True)",
        "all_to_all": (
            "(value, split_dimension, concat_dimension, split_count, groups=None, pin_layout=True)"
        ),
        "collective_permute": "(value, pairs)",
        "collective_broadcast": "(tensors, root_ordinal=0, groups=None, pin_layout=True)",
        "reduce_scatter": (
            "(reduce_type, input, scale, scatter_dim, shard_count, groups=None, output=None, "
            "pin_layout=True)"
        ),
        "mesh_reduce": "(tag, data, reduce_fn)",
        "rendezvous": "(tag, payload=b'', replicas=())",
        "do_on_ordinals": "(target, data=(), ordinals=(0,))",
        "broadcast_master_param": "(model)",
        "reduce_gradients": "(optimizer, groups=None, pin_layout=True)",
        "RateTracker": "(smooth_factor=None)",
    },
    "torch_xla.core.xla_builder": {
        "call_jax": "(jax_func, args, kwargs=None, name=None, override_hash=None)"
    },
    "torch_xla.distributed.parallel_loader": {
        "MpDeviceLoader": "(loader, device, **kwargs)",
        "ParallelLoader": (
            "(cpu_loader, devices, batchdim=0, batches_per_execution=1, loader_prefetch_size=16, "
            "device_prefetch_size=8, host_to_device_transfer_threads=1, input_sharding=None)"
        ),
    },
    "torch_xla.utils.checkpoint": {
        "checkpoint": "(function, *args, use_reentrant=True, preserve_rng_state=True, **kwargs)"
    },
    "torch_xla.distributed.fsdp.utils": {"checkpoint_module": "(module)"},
    "torch_xla.experimental": {
        "eager_mode": "(enable)",
        "is_eager_mode": "()",
        "eager_mode_context": "(enable)",
    },
    "torch_xla.experimental.assume_pure": {
        "assume_pure": "(fn, *, add_rng_seed_argument=False)",
        "PureModule": "(module)",
        "assume_pure_torch": "(func, use_cache=False)",
    },
    "torch_xla.experimental.gradient_accumulation": {
        "gradient_accumulation": "(train_step, iterable_tensors, model, *carried_tensors)"
    },
    "torch_xla.experimental.distributed_checkpoint": {
        "CheckpointManager": (
            "(path, save_interval, max_to_keep=0, max_pending_async=1, num_of_threads=1, "
            "process_group=None, chkpt_on_preemption=True)"
        ),
        "SPMDSavePlanner": "()",
        "SPMDLoadPlanner": "()",
        "prime_optimizer": "(optimizer)",
    },
    "torch_xla.experimental.fori_loop": {"fori_loop": "(lower, upper, body_fun, *init)"},
    "torch_xla.debug.metrics": {
        "counter_names": "()",
        "counter_value": "(name)",
        "metric_names": "()",
        "metric_data": "(name)",
        "clear_counters": "()",
        "clear_metrics": "()",
        "clear_all": "()",
        "metrics_report": "()",
        "short_metrics_report": "(counter_names=None, metric_names=None)",
        "executed_fallback_ops": "()",
    },
    "torch_xla.debug.profiler": {
        "start_server": "(port, only_on_master=True)",
        "trace": (
            "(service_addr, logdir, duration_ms=1000, num_tracing_attempts=3, host_tracer_level=2, "
            "device_tracer_level=1, delay_ms=0, timeout_s=120, interactive=False)"
        ),
        "stop_trace": "()",
    },
    "torch_xla.utils.utils": {"SampleGenerator": "(data, sample_count)"},
}


def signature(function):
    """The text of a function's signature without annotations."""
    found = inspect.signature(function)
    bare = [
        parameter.replace(annotation=parameter.empty) for parameter in found.parameters.values()
    ]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in SIGNATURES.items() for name in names]
)
def test_signature(module, name):
    assert signature(getattr(importlib.import_module(module), name)) == SIGNATURES[module][name]


def test_mesh_of_slices_and_fsdp_take_their_arguments_also_by_position():
    assert (
        signature(HybridMesh)
        == "(ici_mesh_shape, dcn_mesh_shape=None, axis_names=None, *, num_slices=None)"
    )
    assert signature(SpmdFullyShardedDataParallel) == (
        "(module, mesh=None, *, shard_output=None, auto_wrap_policy=None, "
        "auto_wrapper_callable=None, extra_data_axis=None, **kwargs)"
    )


@pytest.mark.parametrize(
    "name",
    [
        "custom_kernel",
        "stablehlo_custom_call",
    ],
)
def test_what_is_not_here_yet_cannot_be_imported(name):
    with pytest.raises(ModuleNotFoundError, match=name):
        importlib.import_module(f"torch_xla.experimental.{name}")


def test_shorthands_of_the_package():
    assert torch_xla.xm is torch_xla.core.xla_model and torch_xla.xr is torch_xla.runtime
    assert (
        torch_xla.xu is torch_xla.utils.utils
        and torch_xla.xmp is torch_xla.distributed.xla_multiprocessing
    )
