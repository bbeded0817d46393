"""The section of a recipe for the built-in harness `search`: the token budget of an agent that edits its own context.

Contract: plain data. `scaled` gives the numbers that an episode runs under; what is 0 is the share of `limit` that
Context-1 gives it, so that one recipe fits models of any context.
"""

from __future__ import annotations

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from inspan.config.sections import Natural, Positive, Section
from inspan.errors import RecipeError

PUBLISHED = {"limit": 32768, "reserve": 500, "soft": 16384, "hard": 24326, "per_call": 4096, "per_call_floor": 512}
"""Context-1's numbers [C], in tokens."""


class Search(Section):
    """The budget of `harness = "search"`, in tokens of the view. 0 means: that share of `limit` as in Context-1 [C]."""

    limit: Natural = Field(
        default=0, description="Tokens that the view may hold, answer included; 0: the model's context."
    )
    reserve: Natural = Field(default=0, description="Kept back for the answer; 0: 500/32768 of `limit` [C].")
    soft: Natural = Field(default=0, description="Beyond it a note asks to prune or conclude; 0: half of `limit` [P].")
    hard: Natural = Field(default=0, description="Beyond it only `prune_chunks` works; 0: 24326/32768 of `limit` [C].")
    per_call: Natural = Field(default=0, description="Most tokens a tool call brings; 0: 4096/32768 of `limit` [C].")
    per_call_floor: Natural = Field(
        default=0,
        description="A tight budget lowers `per_call` to half of what is left, not below this; 0: 512/32768 [C].",
    )
    candidates: Positive = Field(default=50, description="Chunks that a search ranks before it is cut [P].")
    grep_chunks: Positive = Field(default=5, description="Most chunks of a `grep_corpus` [P].")
    note: bool = Field(default=True, description="Whether the note beyond `soft` is shown.")
    prune: bool = Field(default=True, description="Whether `prune_chunks` is offered.")

    @model_validator(mode="after")
    def _ordered(self) -> Search:
        numbers = [n for n in (self.soft, self.hard, max(self.limit - self.reserve, 0)) if n]
        if numbers != sorted(numbers):
            raise PydanticCustomError(
                "combo",
                "soft = {soft}, hard = {hard}, limit = {limit}, reserve = {reserve}: soft may not exceed "
                "hard, nor hard what the reserve leaves of the limit",
                {"soft": self.soft, "hard": self.hard, "limit": self.limit, "reserve": self.reserve},
            )
        return self

    def scaled(self, context: int) -> Search:
        """The section with every number filled in, for a model whose context leaves `context` tokens to the view.

        Raises RecipeError when `limit` asks for more.
        """
        if self.limit > context:
            hint = "lower it, or leave it out; a turn of sampling.max_tokens must fit beside it"
            raise RecipeError(f"{self.limit} exceeds the {context} tokens there are", where="search.limit", hint=hint)
        limit = self.limit or context
        given = {name: getattr(self, name) for name in PUBLISHED}
        filled = {name: value or max(1, limit * PUBLISHED[name] // PUBLISHED["limit"]) for name, value in given.items()}
        filled["limit"] = limit
        filled["hard"] = min(filled["hard"], limit - filled["reserve"])
        filled["soft"] = min(filled["soft"], filled["hard"])
        return self.model_copy(update=filled)
