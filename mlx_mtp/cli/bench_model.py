"""`mlx-mtp bench model`: what memory allows, what is predicted, and what was measured."""

from pathlib import Path

import click

QUICK_ROWS = (2, 4)


@click.command("model")
@click.option("--chip", help='A chip by name, such as "M3 Ultra"; else the one at hand.')
@click.option("--model", help="A released model by name, a checkpoint's directory, or demo.  [default: Step-3.5-Flash]")
@click.option("--config", type=click.Path(path_type=Path), help="A model's config.json, taken in 4 bits.")
@click.option("--context", type=click.IntRange(1), help="Tokens before the rows.  [default: 4096]")
@click.option("--measured", type=click.Path(path_type=Path), multiple=True, help="A result of bench decode|verify|profile.")
@click.option("--validate", is_flag=True, help="Also all constants, published rows and their errors; fails where one is off.")
@click.option("--quick", is_flag=True, help="Only a verify of 2 and of 4 rows.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the result to this file, as one JSON line.")
def model(
    chip: str | None,
    model: str | None,
    config: Path | None,
    context: int | None,
    measured: tuple[Path, ...],
    validate: bool,
    quick: bool,
    out: Path | None,
) -> None:
    """Set a model's byte floor beside what a chip is predicted, and was measured, to need. Nothing runs.

    The floor of a phase is what it has to read: shared weights, each expert that its rows visit once, LM head, KV
    caches. Predictions are a cost model's, with two constants per chip, fitted to published times of M <= 2 rows.
    """
    from rich.console import Console

    from ..bench import result
    from ..bench.roofline import assemble, chips, fit
    from ..bench.roofline.tables import documents_table, tables
    from ..bench.roofline.validation_tables import failed, summary, validation_tables

    on = assemble.find_chip(chip or chips.at_hand())
    subject = assemble.find_model(model, config, on_chip=on is not None)
    rows = QUICK_ROWS if quick else assemble.ROWS
    found = assemble.bench_model(subject, on, context or 4096, rows)
    console = Console()
    console.print(*tables(found))
    if validate:
        published = fit.read_rows()
        console.print(documents_table(found, None) if found["documents"] else "")
        console.print(*validation_tables(found, published, fit.fit(published), subject.name, subject.model, on))
    console.print("\n".join(summary(found)))
    if out:
        result.write(found, out)
    if validate and failed(found):
        raise SystemExit(1)
