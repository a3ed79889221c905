"""Kernels and their measurements, as tables."""

from typing import Any

from orchestrator.show.table import TextTable, grid

Data = dict[str, Any]


def listed(rows: list[Data]) -> TextTable:
    """One line per implementation; GRADIENTS are those with kernels of their own."""
    columns = ("", "KERNELS", "DEVICE", "DRIVER", "DTYPES", "GRADIENTS", "NOTE")
    return grid(columns, (_line(row) for row in rows))


def _line(row: Data) -> tuple[Any, ...]:
    if not row["available"]:
        return "✗", row["name"], "", "", "", "", row["reason"]
    note = "interpreted: correct results, but no meaningful speed" if row["interpreted"] else ""
    driver = " ".join(str(row.get(key, "")) for key in ("driver", "version")).strip()
    return "✓", row["name"], row["device_name"], driver, row["dtypes"], row["gradients"], note


def measured(rows: list[Data]) -> TextTable:
    """One line per measurement: speedup over torch's own kernels."""
    columns = ("OPERATION", "DTYPE", "SHAPES", "CASE", "KERNELS", "SPEEDUP", "95 %", "")
    return grid(columns, (_measured_line(row) for row in rows))


def _measured_line(row: Data) -> tuple[Any, ...]:
    case = "backward" if row["gradient"] else "compiled" if row["compiled"] else "forward"
    about = (row["operation"], row["dtype"], row["shapes"], case, row["kernels"])
    if not row["right"]:
        return *about, "", "", "wrong: never chosen"
    verdict = "faster" if row["low"] > 1 else "slower" if row["high"] < 1 else ""
    return *about, f"{row['speedup']:.2f}", f"{row['low']:.2f} - {row['high']:.2f}", verdict


def resource_use(rows: list[Data]) -> TextTable:
    """One line per target, dtype and kernel with the maximum over its forms, then one per rejected configuration."""
    columns = ("TARGET", "DTYPE", "KERNEL", "FORMS", "REGISTERS", "SPILLS", "SHARED KIB", "")
    kernels: dict[tuple[str, str, str], list[Data]] = {}
    for row in rows:
        kernels.setdefault((row["target"], row["dtype"], row["kernel"]), []).append(row)
    rejected = [row for row in rows if row["refused"]]
    return grid(columns, (*(_most(*item) for item in kernels.items()), *map(_refused_line, rejected)))


def _most(about: tuple[str, str, str], forms: list[Data]) -> tuple[Any, ...]:
    registers, spills, shared = (max(form[key] for form in forms) for key in ("registers", "spills", "shared_bytes"))
    return *about, len(forms), registers, spills, f"{shared / 1024:.3g}", ""


def _refused_line(row: Data) -> tuple[Any, ...]:
    about = row["target"], row["dtype"], row["configuration"]
    return *about, 1, row["registers"], row["spills"], f"{row['shared_bytes'] / 1024:.3g}", row["refused"]
