"""Executes notebooks by nbclient: one kernel for all of them, so that libraries are imported and runs loaded once."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import ensure_async
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from study.io import files
from study.records.privacy import redact

# Drops the names of the notebook before; %reset would search for garbage twice, for half a second each. As in `study`,
# that search is rare.
RESET = "%reset_selective -f .\nimport gc\ngc.set_threshold(100_000, 50, 50)"
DRAWN = ("image/svg+xml", "text/html")  # made of runs that are free of paths already


@contextmanager
def executing(
    paths: Iterable[Path], into: Path, parameters: dict[str, str], say: Callable[[str], None]
) -> Iterator[Future[list[str]]]:
    """Execute notebooks while the caller does something else; the result has the names of those that failed.

    The kernel ends when the caller leaves, however it leaves.
    """
    # Of this environment, not one of its name that the user has installed. Sockets are files: no port is taken.
    kernel = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), transport="ipc")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    executed = asyncio.run_coroutine_threadsafe(_execute_all(kernel, list(paths), into, parameters, say), loop)
    try:
        yield executed
    finally:
        executed.cancel()
        if kernel.has_kernel:
            asyncio.run_coroutine_threadsafe(ensure_async(kernel.shutdown_kernel(now=True)), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _execute_all(
    kernel: AsyncKernelManager, paths: list[Path], into: Path, parameters: dict[str, str], say: Callable[[str], None]
) -> list[str]:
    failed = []
    resources = {"metadata": {"path": str(Path.cwd())}}
    client = NotebookClient(nbformat.v4.new_notebook(), km=kernel, timeout=None, resources=resources)
    try:
        for number, path in enumerate(paths, 1):
            started = time.monotonic()
            problem = ""
            client.nb = with_parameters(nbformat.read(path, as_version=4), parameters)
            try:
                await client.async_execute()  # connects to the kernel once, which takes half a second
            except CellExecutionError as error:
                failed.append(path.stem)
                problem = f"  FAILED: {error.ename}: {error.evalue}"
            _write(client.nb, into / path.name)
            say(f"[{number}/{len(paths)}] {path.stem}  {time.monotonic() - started:.1f} s{problem}")
    finally:
        if client.kc:
            client.kc.stop_channels()
    return failed


def with_parameters(book: NotebookNode, parameters: dict[str, str]) -> NotebookNode:
    """Return the notebook with a cell of parameters after the one that is tagged so, as papermill adds it."""
    (place,) = (at for at, cell in enumerate(book.cells, 1) if "parameters" in cell.metadata.get("tags", []))
    assignments = "\n".join(f"{key} = {value!r}" for key, value in parameters.items())
    book.cells.insert(place, nbformat.v4.new_code_cell(f"# Parameters\n{assignments}"))
    book.cells.insert(0, nbformat.v4.new_code_cell(RESET))
    return book


def _write(book: NotebookNode, path: Path) -> None:
    """Write an executed notebook without paths of the machine, and without the cell that resets names."""
    del book.cells[0]
    for number, cell in enumerate((cell for cell in book.cells if cell.cell_type == "code"), 1):
        cell.execution_count = number
        cell.source = redact(cell.source)
        cell.metadata.pop("execution", None)  # times of day
        for output in cell.outputs:
            drawn = {kind: output.get("data", {}).pop(kind) for kind in DRAWN if kind in output.get("data", {})}
            output.update(nbformat.from_dict(redact(output)))
            if drawn:
                output["data"].update(drawn)
    text = json.dumps(book, separators=(",", ":"), ensure_ascii=False) + "\n"
    files.write_below(path.parent, path.name, text.encode())
