"""The commands and their options. Contract: thin; each command imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from inspan.cli.shell import Stopped


class Commands(TyperGroup):
    """A command that a signal stops says so; typer by itself would end with 130, whatever the signal."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise Stopped("", stop) from None


app = typer.Typer(
    name="inspan",
    cls=Commands,
    help="Train agents with reinforcement learning in the harness that they ship in.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Target = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe (TOML), or the folder of a run.", show_default=False)
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key, e.g. train.lr=1e-4 or rewards.1.weight=0.",
        show_default=False,
    ),
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Check every invariant of the record on the way; a breach stops the run.")
]
AllowDrift = Annotated[
    bool,
    typer.Option("--allow-drift", help="Also in another harness than the run was trained in; say how it differs."),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to write.", show_default=False)]


@app.command()
def train(
    recipe: Target,
    settings: Settings = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")] = False,
    seed: Annotated[int | None, typer.Option(help="Override the recipe's seed.", show_default=False)] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Fixed order and batch shapes: resuming is bit-equal.")
    ] = False,
    verify: Verify = False,
) -> None:
    """Train a policy as a recipe says and write a run directory with its report."""
    from inspan.cli import train as command

    options = command.overridden(settings or [], seed, deterministic)
    command.train(recipe, options, out=out, resume=resume, dry_run=dry_run, verify=verify)


@app.command(name="eval")
def evaluate(
    recipe: Target,
    settings: Settings = None,
    seed: Annotated[int | None, typer.Option(help="Override the recipe's seed.", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    verify: Verify = False,
    allow_drift: AllowDrift = False,
) -> None:
    """Evaluate the arms of a recipe, or of a finished run, on held-out tasks."""
    from inspan.cli import train as command

    command.evaluate(
        recipe, command.overridden(settings or [], seed, False), as_json=json, verify=verify, allow_drift=allow_drift
    )


@app.command()
def chat(
    agent: Annotated[str, typer.Argument(help="swarm, single or search.", show_default=False)],
    base_url: Annotated[str, typer.Option(help="An OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1.")],
    question: Annotated[str, typer.Option(help="What to ask.")],
    api_key: Annotated[str | None, typer.Option(help="Default: $OPENAI_API_KEY.", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="Default: the server's only model.", show_default=False)] = None,
    subagent_model: Annotated[str | None, typer.Option(help="Default: the same model.", show_default=False)] = None,
    corpus: Annotated[
        Path | None,
        typer.Option(help="Folder of texts, JSONL of documents, or (search) an index of them.", show_default=False),
    ] = None,
    critical_steps: Annotated[int, typer.Option(min=1, help="The budget.")] = 14,
    width: Annotated[int, typer.Option(min=1, help="Concurrent sub-agents.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a turn.")] = 512,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not show tool calls.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Tokens that the search agent may see; 0: 32,768.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json to count them by; default: an estimate.", show_default=False)
    ] = None,
) -> None:
    """Ask a built-in agent one question, through any OpenAI-compatible server."""
    from inspan.cli.chat import ChatSettings
    from inspan.cli.chat import chat as command

    command(
        ChatSettings(
            agent,
            base_url,
            question,
            api_key,
            model,
            subagent_model,
            corpus,
            critical_steps,
            width,
            max_tokens,
            quiet,
            limit,
            tokenizer,
        )
    )


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False) -> None:
    """Say what this machine can run, and why not."""
    from inspan.cli.doctor import doctor as command

    raise typer.Exit(command(as_json=json))


@app.command()
def export(
    run: RunDir,
    fmt: Annotated[str, typer.Option("--format", help="jsonl, parquet, atif or otel (OTLP JSON).")] = "jsonl",
    what: Annotated[str, typer.Option(help="trace (a row a message) or training (a row a chain).")] = "trace",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Default: inside the run.", show_default=False)
    ] = None,
    content: Annotated[bool, typer.Option("--content", help="otel: also what was said.")] = False,
    otlp_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="otel: send to this collector.", show_default=False)
    ] = None,
) -> None:
    """Write a run's traces or training data to one file, or send its spans to a collector."""
    from inspan.cli.export import Export
    from inspan.cli.export import export as command

    command(run, Export(fmt, what, out, content, otlp_endpoint))


@app.command()
def index(
    corpus: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder of documents, or a JSONL.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the index is, or is to be.")],
    chunk_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of a chunk (of a new index).")] = 256,
) -> None:
    """Index a corpus, or bring its index up to date: only what is new or changed is read again."""
    from inspan.cli.index import index as command

    command(corpus, out=out, chunk_tokens=chunk_tokens)


@app.command()
def inspect(
    run: RunDir,
    rollout: Annotated[
        str | None, typer.Option(metavar="ID", help="Print the messages of one rollout as a tree.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say what was recorded of a run, how its conversations went on, and what became of every token."""
    from inspan.cli.inspect import inspect as command

    command(run, rollout=rollout, as_json=json)


@app.command()
def serve(
    recipe: Target,
    settings: Settings = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where the traces, grants and the admin key are kept.")
    ] = Path("runs/gateway"),
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    allow_drift: AllowDrift = False,
) -> None:
    """Serve the gateway by itself, with an admin API to let rollouts in; it goes on after kill -9."""
    from inspan.cli.serve import serve as command

    command(recipe, settings or [], out=out, host=host, port=port, allow_drift=allow_drift)


@app.command()
def view(run: RunDir) -> None:
    """Write a run's report anew and print its path."""
    from inspan.cli.export import view as command

    command(run)


@app.command()
def warmstart(recipe: Target, settings: Settings = None, out: Out = None) -> None:
    """Make a base model: tokenizer, copy phase, demonstrations."""
    from inspan.cli import train as command

    command.warmstart(recipe, settings or [], out=out)


def version(value: bool) -> None:
    """Print the version and stop."""
    if value:
        from inspan import __version__

        print(f"inspan {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train agents with reinforcement learning in the harness that they ship in."""
