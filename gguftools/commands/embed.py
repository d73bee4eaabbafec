"""`gguftools embed`: vectors of texts, and how alike they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gguftools import report
from gguftools.commands.options import Json, Threads
from gguftools.embedding import N_BATCH
from gguftools.errors import GGUFError


def embed(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF file.", show_default=False)],
    prompt: Annotated[
        list[str] | None, typer.Option("-p", "--prompt", help="A text; may repeat.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="A text file; each line is a text.", show_default=False)
    ] = None,
    separator: Annotated[
        str, typer.Option("--embd-separator", help=r"What stands between the texts of -f; \n, \t are understood.")
    ] = r"\n",
    pooling: Annotated[
        str | None,
        typer.Option("--pooling", help="none, mean, cls or last; by default the model's own.", show_default=False),
    ] = None,
    normalize: Annotated[
        int, typer.Option("--embd-normalize", min=-1, help="2: length 1; p: the p-norm; 0: 16-bit integers; -1: none.")
    ] = 2,
    attention: Annotated[
        str | None,
        typer.Option("--attention", help="causal or non-causal; by default as the model was made.", show_default=False),
    ] = None,
    batch_size: Annotated[int, typer.Option("-b", "--batch-size", min=1, help="Tokens that run at once.")] = N_BATCH,
    similarity: Annotated[bool, typer.Option("--similarity", help="Print the cosines of all pairs.")] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Turn texts into vectors, one a text; by encoders, or by models that write."""
    from gguftools.commands.generate import unescaped
    from gguftools.embedding import embed as run
    from gguftools.generating import read_text

    texts = list(prompt or ())
    if file is not None:
        texts += [text for text in read_text(file).split(unescaped(separator)) if text.strip()]
    if not texts:
        raise GGUFError("which texts? Give -p or -f")
    if attention not in (None, "causal", "non-causal"):
        raise GGUFError(f"--attention {attention}: expected causal or non-causal")
    causal = None if attention is None else attention == "causal"
    found = run(model, texts, pooling, normalize, batch_size, threads, causal)
    alike = found.similarities() if similarity else None
    if json:
        report.print_json(
            {
                "model": str(model),
                "pooling": found.pooling,
                "embeddings": [
                    {"text": text, "tokens": len(ids), "embedding": vector.tolist()}
                    for text, ids, vector in zip(texts, found.ids, found.vectors)
                ],
                **({} if alike is None else {"similarity": alike.tolist()}),
            }
        )
        return
    if alike is not None:
        columns = ["", *(str(i + 1) for i in range(len(texts)))]
        report.table(columns, [[str(i + 1), *(f"{x:.4f}" for x in row)] for i, row in enumerate(alike)])
        return
    for vector in found.vectors:
        for row in vector.reshape(-1, vector.shape[-1]):
            report.write(" ".join(f"{x:.6f}" for x in row))
