"""The published figures of each kind of chip, as one table."""

from spmd_core.chips import CHIPS

_GIB = 2**30


def page() -> str:
    """A row for each chip of `spmd_core.chips`."""
    rows = [
        "| chip | peak, bf16 | memory | of which usable | memory bandwidth | links, one direction "
        "| network of a chip | devices of a chip |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for chip in CHIPS:
        usable, network = chip.usable_hbm_bytes, chip.dcn_bytes_per_s
        rows.append(
            f"| {chip.name} | {chip.peak_flops / 1e12:,.0f} TFLOP/s | {chip.hbm_bytes / _GIB:.4g} "
            f"GiB | {f'{usable / _GIB:.2f} GiB' if usable else 'not published'} | "
            f"{chip.hbm_bytes_per_s / 1e9:,.0f} GB/s | {chip.links} links, "
            f"{chip.links_bytes_per_s / 1e9:,.0f} GB/s | "
            f"{f'{network / 1e9:.4g} GB/s' if network else 'not published'} | "
            f"{chip.devices_per_chip} |"
        )
    return "\n".join(rows)
