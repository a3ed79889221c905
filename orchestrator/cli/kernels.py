"""`polyfleet kernels …`: implementations of single operations, measured."""

from typing import Annotated

import typer

from orchestrator.cli.output import Format, Output, emit, print_message, progress_line

app = typer.Typer(
    help="Measure and compile kernels: implementations of single operations.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Names = Annotated[
    list[str] | None, typer.Argument(help="Operations such as rmsnorm (default: all)", show_default=False)
]
Kernels = Annotated[str, typer.Option("--kernels", help="Comma-separated implementations (default: all that run here)")]
Dtypes = Annotated[str, typer.Option("--dtypes", help="Comma-separated dtypes")]
Device = Annotated[str, typer.Option("--device", help="Device in torch's notation, e.g. cuda:0")]
Compiled = Annotated[bool, typer.Option(help="Also measure faster implementations inside torch.compile (minutes)")]

COMPILED_FOR = "sm_80,sm_90,sm_100,gfx942,gfx950"
OfTriton = Annotated[
    list[str] | None,
    typer.Argument(help="Kernels such as rmsnorm_rows (default: all)", metavar="[KERNEL]...", show_default=False),
]
Targets = Annotated[str, typer.Option("--target", help="Comma-separated targets to compile for")]


@app.callback()
def kernels() -> None:
    """Implementations of single operations. `polyfleet backends --kernels` lists them."""


@app.command()
def tune(
    operations: Names = None,
    kernels: Kernels = "",
    dtypes: Dtypes = "float32,bfloat16",
    device: Device = "cpu",
    compiled: Compiled = False,
    output: Output = Format.TABLE,
) -> None:
    """Measure which correct implementation is the fastest on this machine's device, and record it for models and
    "auto".

    Nothing is measured at any other time. Each is checked against float64 first, and timed in turns with what torch
    computes by itself.
    """
    from orchestrator import local_machine
    from orchestrator.show.kernels import measured

    asked = {"operations": operations or [], "device": device, "compiled": compiled}
    rows = []
    for row in local_machine.tuned(asked | {"kernels": _words(kernels), "dtypes": _words(dtypes)}):
        rows.append(row)
        told = f"{row['speedup']:.2f} times as fast as torch" if row["right"] else "wrong"
        print_message(f"{row['operation']} {row['dtype']} {row['shapes']} by {row['kernels']}: {told}")
    emit(rows, output, measured)


@app.command()
def resources(kernels: OfTriton = None, target: Targets = COMPILED_FOR, output: Output = Format.TABLE) -> None:
    """Compile every form of the Triton kernels that may be launched for devices that this machine need not have: their
    registers, what spills, their shared memory. Exit code 1 when one spills or exceeds a device.

    About a minute a target the first time; what was compiled of the same source is remembered.
    """
    from orchestrator.show.kernels import resource_use
    from workers.kernels import resources

    with progress_line("compiling") as tell:
        rows = resources.report(
            _words(target),
            lambda done, of: tell(f"{done * 10 // max(of, 1)}0 % of {of} forms are compiled"),
            kernels or (),
        )
    emit([row.to_plain() for row in rows], output, resource_use)
    if refused := resources.spilling(rows):
        print_message(f"{len(refused)} of {len(rows)} forms may not be launched")
        raise typer.Exit(1)
    print_message(f"{len(rows)} forms: none spills a register or exceeds its device")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
