"""How much of its context a search agent may fill. Contract: pure; every number comes from the recipe's `[search]`.

0 ······ soft ······ hard ······ limit − reserve ··· limit
  free    a note asks  only        the answer is
          to prune     prune works  asked for
"""

from __future__ import annotations

from dataclasses import dataclass

from inspan.config.search import Search


@dataclass(frozen=True, slots=True)
class Budget:
    """The thresholds of an episode, over the tokens that are used of it."""

    search: Search  # scaled: no number is 0

    def line(self, used: int) -> str:
        """What every turn shows."""
        return f"[Token usage: {used}/{self.search.limit}]"

    def note(self, used: int) -> str | None:
        """What a turn beyond the soft threshold shows as well."""
        if used <= self.search.soft or not self.search.note:
            return None
        return "Prune chunks or conclude." if self.search.prune else "Conclude soon."

    def refusal(self, used: int) -> str | None:
        """What any tool but prune_chunks answers beyond the hard threshold."""
        if used <= self.search.hard:
            return None
        remedy = "only prune_chunks works now; prune or answer" if self.search.prune else "answer now"
        return f"error: {used} of {self.search.limit} tokens are used: {remedy}"

    def over(self, used: int) -> bool:
        """Whether nothing is left but what is kept back for the answer."""
        return used >= self.search.limit - self.search.reserve

    def allowance(self, used: int) -> int:
        """Tokens that a search or grep may bring: `per_call`, less when the budget is tight."""
        left = self.search.limit - self.search.reserve - used
        return min(self.search.per_call, max(self.search.per_call_floor, left // 2))

    def reading(self, used: int) -> int:
        """Tokens that read_document may bring: what is left up to the hard threshold, so that one can still prune."""
        return max(self.search.per_call_floor, self.search.hard - used)
