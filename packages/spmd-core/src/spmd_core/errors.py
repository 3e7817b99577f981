"""Every exception that the project raises on purpose, without any import.

    SpmdError                                            catches all of them
    ├── MeshError            (ValueError)                a mesh cannot be built, read or placed
    ├── PartitionSpecError   (ValueError)                a spec does not fit its mesh or tensor
    ├── DataError            (ValueError)                host data cannot be loaded or sharded
    ├── ShardError           (RuntimeError, ValueError)  no shards, or shards that do not fit
    ├── WrapError            (RuntimeError, ValueError)  a module cannot be wrapped as asked
    ├── DeviceMismatchError  (RuntimeError)              different devices in one operation, or none
    ├── NotInSpmdModeError   (RuntimeError)              the call needs SPMD mode
    ├── HostFallbackError    (RuntimeError)              strict mode met work for the host
    ├── DeviceMemoryError    (RuntimeError)              the devices have too little memory
    ├── ProgramError         (RuntimeError)              a program failed to compile or run
    ├── ControlFlowError     (RuntimeError)              what a loop runs cannot run on the device
    ├── CaptureError         (RuntimeError)              a step does more than its program repeats
    ├── ProcessError         (RuntimeError)              processes of one program went apart
    ├── VerificationError    (RuntimeError)              results depend on the partitioning
    ├── IndexRangeError      (IndexError, RuntimeError)  an index outside its dim, found by a check
    ├── PlanError            (ValueError, RuntimeError)  a plan cannot be made as asked
    ├── AutoShardingError    (RuntimeError)              no sharding is found for a step
    ├── CheckpointError      (RuntimeError, ValueError)  a checkpoint cannot be written or taken
    ├── PlanReadError        (RuntimeError)              what is planned reads a value
    └── UnsupportedOpError   (NotImplementedError)       no lowering and no fallback

Each class also derives from the builtin exceptions in brackets, so that code without an import of
this project can catch it. Every message states the rule, then what the call got (names and
numbers), then what to do.
"""


class SpmdError(Exception):
    """The base of every exception that this project raises on purpose."""


class MeshError(SpmdError, ValueError):
    """A mesh cannot be built from its arguments, read from its text, or placed on the devices."""


class PartitionSpecError(SpmdError, ValueError):
    """A partition spec names an unknown axis, uses one twice, or does not fit the tensor's rank."""


class WrapError(SpmdError, RuntimeError, ValueError):
    """A module cannot be a unit or be wrapped, or its result cannot be laid out on the mesh."""


class ShardError(SpmdError, RuntimeError, ValueError):
    """A tensor has no sharding where one is needed, or the shards given for it do not fit it."""


class DeviceMismatchError(SpmdError, RuntimeError):
    """Tensors of different devices met in one operation, or a device was named that is none."""


class NotInSpmdModeError(SpmdError, RuntimeError):
    """A call that needs SPMD mode was made while SPMD mode was off."""


class UnsupportedOpError(SpmdError, NotImplementedError):
    """An operation has no lowering, no decomposition and no host fallback."""


class HostFallbackError(SpmdError, RuntimeError):
    """In strict mode, an operation would have run on the host instead of the devices."""


class DeviceMemoryError(SpmdError, RuntimeError):
    """A program or its buffers need more memory than the devices have."""


class ProgramError(SpmdError, RuntimeError):
    """A recorded program could not be lowered, compiled or executed."""


class ControlFlowError(SpmdError, RuntimeError):
    """What a loop or a branch runs reads on the host, writes outside, or is asked for too much."""


class CaptureError(SpmdError, RuntimeError):
    """A captured step depends on, or changes, more than its program would repeat."""


class ProcessError(SpmdError, RuntimeError):
    """The processes of one program do not do the same: one failed, or took another path."""


class VerificationError(SpmdError, RuntimeError):
    """Under `debugging.verify()`, a partitioned program's results differ from one device's."""


class IndexRangeError(SpmdError, IndexError, RuntimeError):
    """Under `config.check_indices`, an index computed on the device lay outside its dim."""


class PlanError(SpmdError, ValueError, RuntimeError):
    """A plan cannot be made: an unknown topology, a mesh that does not fit it, no compiler."""


class PlanReadError(SpmdError, RuntimeError):
    """What is planned reads a value on the host, and a plan computes none."""


class DataError(SpmdError, ValueError):
    """Host data cannot be loaded, batched or sharded as asked."""


class AutoShardingError(SpmdError, RuntimeError):
    """Shardings cannot be found: marks contradict each other, none fits, a step cannot be read."""


class CheckpointError(SpmdError, RuntimeError, ValueError):
    """A checkpoint cannot be written or read, or is none of what it is to be restored into."""
