"""Records a checkpoint's header for the tests: ``python tests/record_header.py model.safetensors NAME --source WHERE``.

What is recorded are names, dtypes, shapes and the file's metadata. No weight is read.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from slipcast.cli.errors import run_reporting
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.errors import UnsupportedFileError
from slipcast.registry.new_files import new_file
from support.recorded import DATA, Record, record_text


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("name")
@click.option("--source", required=True, help="Where the file was published, as 'publisher/repository file'.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=DATA / "headers", help="The folder to write NAME.json to."
)
def main(path: Path, name: str, source: str, out: Path) -> None:
    """Record the header of the checkpoint PATH, of one model, as NAME.json."""
    headers = read_checkpoint(path).headers
    if len(headers) != 1:
        raise UnsupportedFileError(
            f"a pipeline of {len(headers)} models",
            expected="one model",
            hint="name the folder of one of them",
            path=path,
            items=headers,
        )
    (header,) = headers.values()
    tensors = {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors.values()}
    record = Record(name, source, None, header.metadata, tensors)
    file = out / f"{name}.json"
    with new_file(file) as written:
        written.write(record_text(record).encode())
    click.echo(f"{file}: {len(tensors)} tensors. Read it before you publish it: the metadata is the file's own.")


if __name__ == "__main__":
    sys.exit(run_reporting(lambda: main(standalone_mode=False), as_json=False))
