"""The section of the harness `command`: any outside program. Contract: plain data, as in `sections`.

Texts of `argv`, `stdin`, `env` and `files` may hold placeholders: `{task}`, `{task_id}`, `{task_file}` (the prompt),
`{task_json}` (the task without its answer), `{base_url}`, `{base_url:ROLE}`, `{root_url}` (without `/v1`),
`{root_url:ROLE}`, `{api_key}`, `{model}`, `{workspace}`, `{home}` and `{folder}`. Other braces stay as they are.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from inspan.config.sections import Natural, Positive, Section, nearest

PLACEHOLDER = re.compile(r"\{([a-z_]+)(?::([\w.-]+))?\}")
NAMES = (
    "task", "task_id", "task_file", "task_json", "base_url", "root_url", "api_key", "model", "workspace", "home",
    "folder",
)  # fmt: skip
WITH_ROLE = ("base_url", "root_url")


class Command(Section):
    """An outside program as a harness; see docs/clients.md."""

    argv: list[str] = Field(default=[], description="The program and its arguments; no shell takes part.")
    stdin: str = Field(default="", description="What it reads on standard input, e.g. `{task}`.")
    env: dict[str, str] = Field(
        default={},
        description="Its environment, beside OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, "
        "HOME, TMPDIR, LANG and PATH. Nothing else of ours is passed on.",
    )
    pass_env: list[str] = Field(default=[], description="Variables of our own environment that it gets.")
    path: list[str] = Field(default=[], description="Folders before PATH, relative to the recipe.")
    folder: str = Field(default="", description="What `{folder}` stands for; the recipe's own folder by default.")
    template: str = Field(default="", description="Folder that is copied into each rollout's workspace.")
    files: dict[str, str] = Field(
        default={}, description="Files written before the start; a name that begins with `~/` is in the home."
    )
    answer: Literal["stdout", "file", "diff"] = Field(
        default="stdout", description="Where the answer is: standard output, a file, or what changed in the workspace."
    )
    answer_file: str = Field(
        default="", description='The file, in the workspace or with `~/` in the home, for `answer = "file"`.'
    )
    pick: str = Field(
        default="whole",
        description="What of it is the answer: `whole`, `last_line`, `json:KEY.KEY` (of the last line that is JSON), "
        "or `regex:EXPRESSION` (the last match; its first group if it has one).",
    )
    ok_exits: list[int] = Field(default=[0], description="Exit codes that are no failure.")
    output_bytes: Positive = Field(default=4 * 1024 * 1024, description="Most bytes of an answer; beyond it a failure.")
    keep: bool = Field(
        default=False, description="Leave the workspaces, to be looked at, with what the programs wrote."
    )
    install: str = Field(default="", description="How to install the program; told when it is missing.")
    threads: Annotated[Natural, Field(le=64)] = Field(
        default=1, description="OMP_NUM_THREADS of the program; 0: not set."
    )

    @model_validator(mode="after")
    def _sound(self) -> Command:
        for text in (*self.argv, self.stdin, *self.env.values(), *self.files.values(), *self.files):
            if "\0" in text:
                raise PydanticCustomError("combo", "a text holds a NUL character")
            for found in PLACEHOLDER.finditer(text):
                name, role = found[1], found[2]
                close = nearest(name, NAMES)
                if (name not in NAMES and close) or (role and name not in WITH_ROLE):
                    raise PydanticCustomError(
                        "combo",
                        "unknown placeholder {found}; known: {known}",
                        {"found": found[0], "known": ", ".join(f"{{{one}}}" for one in NAMES)},
                    )
        if self.answer == "file" and not self.answer_file:
            raise PydanticCustomError("combo", 'answer = "file" needs `answer_file`')
        kind, _, rest = self.pick.partition(":")
        if kind not in ("whole", "last_line", "json", "regex") or (kind in ("json", "regex")) != bool(rest):
            raise PydanticCustomError(
                "combo", "`pick` is whole, last_line, json:KEY or regex:EXPRESSION, not {pick}", {"pick": self.pick}
            )
        if kind == "regex":
            try:
                re.compile(rest)
            except re.error as error:
                raise PydanticCustomError("combo", "`pick`: not a regular expression: {e}", {"e": str(error)}) from None
        for name in (*self.files, self.answer_file):
            parts = name.removeprefix("~/").split("/")
            if name and (name.startswith("/") or ".." in parts or not parts[-1]):
                raise PydanticCustomError("combo", "a file lies in the workspace: {name}", {"name": name})
        return self
