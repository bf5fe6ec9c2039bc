"""Gather the commands of `mlx-mtp bench`: is drafting faster here, why or why not, and where the time goes."""

import click

from .bench_decode import compare, decode
from .bench_kernels import kernels
from .bench_model import model
from .bench_pictures import plot
from .bench_profile import profile
from .bench_verify import verify


@click.group(invoke_without_command=True)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Measure a model on this machine; the last line of each command is its result as JSON."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        raise SystemExit(2)


for command in (decode, compare, verify, kernels, profile, model, plot):
    bench.add_command(command)
