"""What rules know, read from the states that they save."""

from proxreplay.proximal import GramRule
from proxreplay.proximal.statistics.decay import Aged


def averages(rule: GramRule) -> dict[str, Aged]:
    """The moving averages of a rule's statistics, by site."""
    saved = rule.state_dict().get("history", {})
    return {name: Aged.from_state(one) for name, one in saved.items()}
