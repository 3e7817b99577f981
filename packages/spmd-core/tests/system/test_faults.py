"""The faults that `scripts/mutation.py` plants are about the code as it is."""

from pathlib import Path

from scripts.faults import FAULTS

ROOT = Path(__file__).parents[4]


def test_every_fault_replaces_one_place():
    for fault in FAULTS:
        (path,) = ROOT.glob(f"packages/*/src/{fault.file}")
        assert path.read_text().count(fault.old) == 1, fault.what
        assert fault.new != fault.old
