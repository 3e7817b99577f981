"""Every exception that the project raises on purpose; nothing here imports anything.

    SpmdError                   catches all of them
    ├── MeshError               (ValueError)                a mesh that cannot be built, read or placed on this machine
    ├── PartitionSpecError      (ValueError)                a partition spec that does not fit its mesh or its tensor
    ├── DataError               (ValueError)                host data that cannot be loaded or sharded as asked
    ├── ShardError              (RuntimeError, ValueError)  a tensor without shards, or shards that do not fit it
    ├── WrapError               (RuntimeError, ValueError)  a module that cannot be a unit of FSDP, or whose result cannot be laid out
    ├── DeviceMismatchError     (RuntimeError)              tensors of different devices met in one operation
    ├── NotInSpmdModeError      (RuntimeError)              a call that needs SPMD mode came before it was enabled
    ├── HostFallbackError       (RuntimeError)              strict mode met work that would run on the host
    ├── DeviceMemoryError       (RuntimeError)              a program or its buffers do not fit the devices
    ├── ProgramError            (RuntimeError)              a recorded program could not be lowered, compiled or run
    └── UnsupportedOpError      (NotImplementedError)       an operation that has neither a lowering nor a fallback

Each one is also the builtin exceptions in brackets, so that code which knows nothing of this project can catch it. Every message
states the rule, then what was got (names and numbers), then what to do.
"""


class SpmdError(Exception):
    """The base of every exception that this project raises on purpose."""


class MeshError(SpmdError, ValueError):
    """A mesh cannot be built from its arguments, read from its text, or placed on this machine's devices."""


class PartitionSpecError(SpmdError, ValueError):
    """A partition spec names an axis wrongly, uses one twice, or does not fit the tensor's rank."""


class WrapError(SpmdError, RuntimeError, ValueError):
    """A module cannot be made a unit of FSDP as asked, or what it returns cannot be laid out over the mesh."""


class ShardError(SpmdError, RuntimeError, ValueError):
    """A tensor has no sharding where one is needed, or the shards given for it do not fit."""


class DeviceMismatchError(SpmdError, RuntimeError):
    """Tensors that live on different devices met in one operation."""


class NotInSpmdModeError(SpmdError, RuntimeError):
    """A call that only makes sense in SPMD mode was made before SPMD mode was enabled."""


class UnsupportedOpError(SpmdError, NotImplementedError):
    """An operation has no lowering, no decomposition and no host fallback."""


class HostFallbackError(SpmdError, RuntimeError):
    """Strict mode met an operation that would have run on the host instead of the devices."""


class DeviceMemoryError(SpmdError, RuntimeError):
    """A program or its buffers need more memory than the devices have."""


class ProgramError(SpmdError, RuntimeError):
    """A recorded program could not be lowered, compiled or executed."""


class DataError(SpmdError, ValueError):
    """Host data cannot be loaded, batched or sharded as asked."""
