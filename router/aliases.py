"""Resolve the aliases of the settings: each alias has ordered candidates, which are models or other aliases. Pure.

A candidate with the same name as its alias is the model of that name. An alias can therefore add fallbacks to a model
while clients keep using the model's name. Names are case-insensitive. The last candidate may be an upstream, written
`upstream:NAME`.
"""

from collections.abc import Collection, Mapping, Sequence

UPSTREAM_PREFIX = "upstream:"
MAX_ALIASES = 256
"""Maximum number of aliases in the settings."""
MAX_CANDIDATES = 32
"""Maximum number of candidates of one alias, after nested aliases are expanded. A placement may try all of them."""

Aliases = Mapping[str, Sequence[str]]
"""Ordered candidates by alias, as written in the settings."""


def find_alias_fault(aliases: Aliases, upstreams: Collection[str] = ()) -> str:
    """Return the first fault in the aliases as one sentence, or an empty string if they are valid.

    `upstreams` are the names of the configured upstreams.
    """
    if len(aliases) > MAX_ALIASES:
        return f"there are {len(aliases)} aliases, at most {MAX_ALIASES} are allowed"
    folded: dict[str, str] = {}
    for alias, candidates in aliases.items():
        if not alias.strip() or alias.casefold().startswith(UPSTREAM_PREFIX):
            return f"an alias cannot have the name {alias!r}"
        if alias.casefold() in folded:
            return f"the aliases {folded[alias.casefold()]} and {alias} differ only in case"
        folded[alias.casefold()] = alias
        if not candidates or not all(candidate.strip() for candidate in candidates):
            return f"the alias {alias} has {'an empty candidate' if candidates else 'no candidates'}: name its models"
    free = set[str]()
    for alias in aliases:
        cycle = _find_cycle(aliases, folded, (alias,), free)
        if cycle:
            return f"the aliases form a cycle: {' -> '.join(cycle)}"
    for alias in aliases:
        fault = _find_fault_of_candidates(alias, list_candidates(aliases, alias), upstreams)
        if fault:
            return fault
    return ""


def list_candidates(aliases: Aliases, alias: str) -> tuple[str, ...]:
    """Return the candidates of an alias in order: models, and possibly an upstream at the end.

    A candidate that is itself an alias is replaced by its candidates. Of duplicates, only the first is returned. Raise
    `KeyError` if `aliases` has no alias of exactly this name.
    """
    folded = {name.casefold(): name for name in aliases}
    candidates: dict[str, str] = {}
    _collect_candidates(aliases, folded, alias, candidates, {alias})
    return tuple(candidates.values())


def is_upstream(candidate: str) -> bool:
    """Return whether a candidate is written as an upstream, `upstream:NAME`."""
    return candidate.casefold().startswith(UPSTREAM_PREFIX)


def get_upstream_name(candidate: str) -> str:
    """Return the name in the candidate `upstream:NAME`. Call this only for a candidate that `is_upstream` accepts."""
    return candidate[len(UPSTREAM_PREFIX) :]


def _collect_candidates(
    aliases: Aliases, folded: Mapping[str, str], alias: str, candidates: dict[str, str], expanded: set[str]
) -> None:
    """Add the candidates of an alias to `candidates`, keyed by case-folded name. Skip the aliases in `expanded`."""
    for candidate in aliases[alias]:
        inner = _find_alias_of_candidate(folded, alias, candidate)
        if inner is None:
            candidates.setdefault(candidate.casefold(), candidate)
        elif inner not in expanded:
            expanded.add(inner)
            _collect_candidates(aliases, folded, inner, candidates, expanded)


def _find_alias_of_candidate(folded: Mapping[str, str], alias: str, candidate: str) -> str | None:
    """Return the alias that a candidate names. Return None for a model; the alias's own name also means a model."""
    return None if candidate.casefold() == alias.casefold() else folded.get(candidate.casefold())


def _find_cycle(aliases: Aliases, folded: Mapping[str, str], path: tuple[str, ...], free: set[str]) -> tuple[str, ...]:
    """Return a cycle that is reachable from the last alias of `path`; an empty tuple if there is none.

    The cycle ends with the alias that it starts with. `folded` maps case-folded names to aliases. `free` collects the
    aliases that lead to no cycle, so that they are not searched again.
    """
    for candidate in aliases[path[-1]]:
        inner = _find_alias_of_candidate(folded, path[-1], candidate)
        if inner in path:
            return (*path[path.index(inner) :], inner)
        cycle = () if inner is None or inner in free else _find_cycle(aliases, folded, (*path, inner), free)
        if cycle:
            return cycle
    free.add(path[-1])
    return ()


def _find_fault_of_candidates(alias: str, candidates: Sequence[str], upstreams: Collection[str]) -> str:
    if len(candidates) > MAX_CANDIDATES:
        return f"the alias {alias} has {len(candidates)} candidates, at most {MAX_CANDIDATES} are tried"
    for at, candidate in enumerate(candidates):
        if not is_upstream(candidate):
            continue
        name = get_upstream_name(candidate)
        if name not in upstreams:
            return f"the alias {alias} names the upstream {name!r}, which router.upstreams does not have"
        if at < len(candidates) - 1:
            return (
                f"the alias {alias} has {candidate} before {candidates[at + 1]}: an upstream can only be the last one"
            )
        if at == 0:
            return f"the alias {alias} has only {candidate}: name a model before it"
    return ""
