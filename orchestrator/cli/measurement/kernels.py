"""`polyfleet kernels …`: measure and compile implementations of single operations."""

from typing import Annotated

import typer

from orchestrator.cli.terminal.output import Format, Output, emit, print_message, progress_line

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

DEFAULT_TARGETS = "sm_80,sm_90,sm_100,gfx942,gfx950"
TritonKernels = Annotated[
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

    Only this command measures. Each implementation is checked against float64 first, then timed alternately with
    torch's own.
    """
    from orchestrator.client import local_machine
    from orchestrator.show.kernels import measured

    request = {"operations": operations or [], "device": device, "compiled": compiled}
    rows = []
    for row in local_machine.tune(request | {"kernels": _split_names(kernels), "dtypes": _split_names(dtypes)}):
        rows.append(row)
        outcome = f"{row['speedup']:.2f} times the speed of torch" if row["right"] else "wrong result"
        print_message(f"{row['operation']} {row['dtype']} {row['shapes']} by {row['kernels']}: {outcome}")
    emit(rows, output, measured)


@app.command()
def resources(kernels: TritonKernels = None, target: Targets = DEFAULT_TARGETS, output: Output = Format.TABLE) -> None:
    """Compile every configuration of the Triton kernels that may be launched, also for devices that this machine does
    not have, and print their registers, spills and shared memory. Exit code 1 if one spills or exceeds a device.

    It takes one to four minutes per target the first time; results are cached until the source changes.
    """
    from orchestrator.show.kernels import resource_use
    from workers.kernels.compilation import resources

    with progress_line("compiling") as update:
        rows = resources.compile_report(
            _split_names(target),
            lambda done, of: update(f"compiled {done * 10 // max(of, 1)}0 % of {of} configurations"),
            kernels or (),
        )
    emit([row.to_plain() for row in rows], output, resource_use)
    if refused := resources.refused_rows(rows):
        print_message(f"{len(refused)} of {len(rows)} configurations may not be launched")
        raise typer.Exit(1)
    print_message(f"{len(rows)} configurations: none spills a register or exceeds its device")


def _split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
