"""The faults that `scripts/mutation.py` plants, one at a time: what a tired programmer writes.

By folder, from the lowest layer up; the folders of one layer in the order of their names.
"""

from . import calls, lowerings, programs, training
from .fault import Fault as Fault

FAULTS = (*lowerings.FAULTS, *programs.FAULTS, *calls.FAULTS, *training.FAULTS)
