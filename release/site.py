"""Pages of the site that are generated at build: commands from their `--help`, classes from their docstrings.

A hook of MkDocs (`hooks` in mkdocs.yml). Neither page is in the repository, so neither can be out of date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

WORKER_SCRIPT = "https://unpkg.com/iframe-worker/shim"  # as the theme's plugin `offline` has it

CLASSES = {
    "Training": [
        "rowhaul.train.config.TrainConfig",
        "rowhaul.train.cluster_config.ClusterConfig",
        "rowhaul.pruning.settings.PruneSettings",
        "rowhaul.schedule.lifetimes.policy.RowPolicy",
        "rowhaul.train.run.train_run",
        "rowhaul.train.loading.load_trained",
        "rowhaul.export.pretrained.load_pretrained",
        "rowhaul.nn.models.build_model",
    ],
    "Embeddings": [
        "rowhaul.nn.config.EmbeddingBagConfig",
        "rowhaul.nn.embedding.EmbeddingBagCollection",
        "rowhaul.nn.config.EmbeddingConfig",
        "rowhaul.nn.unpooled.EmbeddingCollection",
        "rowhaul.nn.jagged.keyed_jagged_tensor.KeyedJaggedTensor",
        "rowhaul.nn.jagged.jagged_tensor.JaggedTensor",
        "rowhaul.nn.jagged.keyed_tensor.KeyedTensor",
        "rowhaul.nn.optimizer.RowOptimizer",
        "rowhaul.nn.batch.Batch",
        "rowhaul.optim.rules",
    ],
    "A model of PyTorch": ["rowhaul.nn.wrapping.wrap.wrap", "rowhaul.nn.wrapping.wrap.step_rows_with"],
    "Data": ["rowhaul.data.schema.Schema", "rowhaul.data.stream.SampleStream"],
    "A loop of your own over several workers": [
        "rowhaul.cluster.joining.join",
        "rowhaul.cluster.launcher.launch",
        "rowhaul.train.distributed.setup.distribute",
        "rowhaul.train.distributed.evaluation.evaluate",
        "rowhaul.train.distributed.own_loop.save_checkpoint",
        "rowhaul.train.distributed.own_loop.find_checkpoint",
        "rowhaul.train.distributed.dcp.find_dcp",
        "rowhaul.train.distributed.dcp.load_dcp",
        "rowhaul.checkpoint.dcp.DcpReader",
    ],
    "The embedding database": [
        "rowhaul.database.database.EmbeddingDatabase",
        "rowhaul.database.distributed.database.DistributedEmbeddingDatabase",
        "rowhaul.database.bags.DatabaseBags",
        "rowhaul.transport.dense.dense_sum.DenseSum",
        "rowhaul.database.settings",
    ],
    "Serving": ["rowhaul.serve.scorer.Scorer"],
    "Retrieval": ["rowhaul.retrieval.index.ItemIndex", "rowhaul.retrieval.index.write_index"],
    "Errors": ["rowhaul.errors"],
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, text in {
        "reference/commands.md": "\n".join(commands()),
        "reference/python.md": "\n".join(classes()),
    }.items():
        files.append(File.generated(config, path, content=text))
    return files


def classes() -> Iterator[str]:
    """A page that asks mkdocstrings for every class that a user meets."""
    yield "# Python\n\nWhat `import rowhaul` gives you, and the modules behind it.\n"
    for title, names in CLASSES.items():
        yield f"## {title}\n"
        yield from (f"::: {name}\n" for name in names)


def commands() -> Iterator[str]:
    """A page of all commands and their options."""
    from rowhaul.cli.app import app

    root: Any = typer.main.get_command(
        app
    )  # of click, or of the copy of it that newer versions of typer have
    yield "# Commands\n\nWhat `rowhaul COMMAND --help` prints, by what you want to do.\n"
    by_panel: dict[str, list[tuple[str, Any]]] = {}
    for name, command in root.commands.items():
        found = by_panel.setdefault(getattr(command, "rich_help_panel", None) or "Commands", [])
        if hasattr(command, "commands"):
            found.extend((f"{name} {part}", one) for part, one in command.commands.items())
        else:
            found.append((name, command))
    for panel, of_panel in by_panel.items():
        yield f"## {panel}\n"
        for name, command in of_panel:
            yield from _command(f"rowhaul {name}", command)


def _command(name: str, command: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=name)
    yield f"### {name}\n\n{_plain(command.help or '')}\n"
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"```text\n{name} {usage}\n```\n"
    yield "| option | | |\n|---|---|---|"
    for parameter in command.params:
        help_text = getattr(parameter, "help", None) or ""
        if getattr(parameter, "hidden", False):
            continue
        names = ", ".join(f"`{one}`" for one in (*parameter.opts, *parameter.secondary_opts))
        if parameter.param_type_name == "argument":
            names = f"`{parameter.name}`"
        yield f"| {names} | {_default(parameter)} | {_plain(help_text)} |"
    yield ""


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    default = parameter.default
    if default in (None, [], (), "", False) or callable(default):
        return ""
    return f"`{default}`"


def _plain(text: str) -> str:
    """Text without rich's markup, safe in a table and in Markdown."""
    text = re.sub(r"\s+", " ", text.replace("|", "\\|")).strip()
    return re.sub(r"(?<!`)<([^>]+)>", r"`<\1>`", text).replace("*", "\\*")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take the script that search needs in files from the site itself."""
    up = "../" * page.url.count("/")
    return output.replace(f'src="{WORKER_SCRIPT}"', f'src="{up}worker.js"')
