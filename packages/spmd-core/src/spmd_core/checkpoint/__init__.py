"""`CheckpointManager`: checkpoints of sharded state on disk. An extra: `[checkpoint]`.

From a state to the disk and back, and the file of each step:

    state: {"model": model, "optimizer": optimizer, "epoch": 3}
      │  entries.py    every tensor by its name: of a parameter, the plain model's, and of an
      │                optimizer's state the parameter's; tied ones once; the rest by plain.py
      ├─► JSON         the structure, with plain values; a tensor is its array's name
      └─► arrays       name -> a tensor, or a row of a stacked one
            │  blocks.py    each distinct block has one owner among the devices that hold it
            │  staging.py   this process's blocks, copied to host memory; `save` returns
            │  behind.py    the save in flight; on the CPU's devices, it rests by pace.py
            │  database.py  zarr 3 in OCDBT, one database for each process
            │    disk.py    on a disk: chunks by direct.py, past the system's cache of files, and
            │               their index by ocdbt.py; in a store of objects, by tensorstore
            │  writer.py    these merged, and Orbax's files beside; the step renamed, last
            │  meetings.py  several processes: all go on, or all learn that one has failed
            ▼  retention.py then: which steps go
    folder/<step>/{arrays,state}       lock.py: one run at a time writes here
            │  parts.py     a state beside the saved one: what goes where, all that does not fit
            │  store.py     reads blocks, each chunk once, and compares its checksum
            │    disk_arrays.py         what disk.py has written, by its index: index_reading.py
            │    tensorstore_arrays.py  all else; both are `Arrays`, in arrays.py
            ▼  restoring.py each device's block by itself, into any sharding; then load_state_dict

    remote.py: a folder in a store of objects
    threads.py: who copies, writes and reads, also when the program has ended
    convert.py: a step as a safetensors or a torch file, and the other way round

Buffers: the next step takes over those that are being saved, so they are copied, not protected.
"""

from spmd_core.checkpoint.loading import Restored, load_checkpoint
from spmd_core.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager", "Restored", "load_checkpoint"]
