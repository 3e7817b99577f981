"""Where figures come from: the date, versions, sources and hardware."""

import hashlib
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# What decides the figures: a change of documents or results makes no other figures.
SOURCES = ("packages", "examples", "benchmarks", "constraints.txt", ":!benchmarks/results")


def environment() -> dict[str, Any]:
    """What the figures of this process depend on.

    Returns:
        date, commit (see `commit`), python, cpu (its name), cores, memory_bytes, and the versions
        of torch, jax, jaxlib and transformers.
    """
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        **{name: metadata.version(name) for name in ("torch", "jax", "jaxlib", "transformers")},
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The last commit of what is measured; with a hash of what is not committed behind a +."""

    def git(*arguments: str) -> bytes:
        command = ["git", *arguments, "--", *SOURCES]
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout

    try:
        last = git("log", "-1", "--format=%h", "--abbrev=12").decode().strip()
        new = git("ls-files", "--others", "--exclude-standard", "-z").decode().split("\0")
        changes = git("diff", "HEAD") + b"".join((ROOT / f).read_bytes() for f in new if f)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # the sources were not cloned
    return f"{last}+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else last
