"""Resolve the names that clients use for models: a model's own name, an alias, or either with `:PROFILE`. Pure.

The first of these rules that finds a match decides:

1. Aliases, then models, with exactly this name.
2. Aliases, then models, ignoring case. For models, also ignoring provider parts (`openai/`).
3. Aliases, ignoring case and provider parts.
4. Rules 1 to 3 for the part before the last colon; the part after it is the profile. A model whose own name has a colon
   is found by its whole name.

A key that may use an alias may use all its candidates through it. A key that may not use the alias by its name may use
only those candidates that it may use by their own names.
"""

import msgspec
from msgspec.structs import replace

from router.admission.key_scope import filter_view
from router.admission.rate_limits import NO_LIMITS, KeyLimits, refuse_model
from router.aliases import get_upstream_name, is_upstream, list_candidates
from router.placement.cluster_view import MAX_NAME_PREFIXES, ClusterView
from router.profiles import ProfileSettings
from router.settings import RouterSettings
from wire.refusals import RefusalCode, Refused
from wire.report import Model


class ModelTarget(msgspec.Struct, frozen=True, gc=False):
    """Models to which the name in a request resolves."""

    candidates: tuple[str, ...]
    """Models in order of preference, at least one; exactly one if the name is not an alias."""
    permitted: str
    """Name to check against the model limits of the key.

    It is the alias if the key may use it by name, else the first of `candidates`.
    """
    alias: str = ""
    """Alias that the client named; empty if the name is not an alias."""
    profile: str = ""
    """Profile that the client named; empty without one."""
    upstream: str = ""
    """Name of the upstream at the end of the alias; empty for none.

    It is also empty for a key that may not use the alias by its name.
    """


class ModelNames:
    """Resolver of model names, with the aliases and profiles of the settings."""

    def __init__(self, settings: RouterSettings) -> None:
        self.aliases: dict[str, tuple[str, ...]] = {}
        """Models of each alias in order, with nested aliases expanded, without an upstream at the end."""
        self._upstreams: dict[str, str] = {}
        for name in settings.aliases:
            *models, last = list_candidates(settings.aliases, name)
            if is_upstream(last):
                self._upstreams[name] = get_upstream_name(last)
            else:
                models.append(last)
            self.aliases[name] = tuple(models)
        self.has_upstreams = bool(self._upstreams)
        """Whether at least one alias has an upstream."""
        self._profiles = settings.profiles
        self._folded = {name.casefold(): name for name in self.aliases}
        self._folded_profiles = {name.casefold(): name for name in self._profiles}

    def is_plain(self, name: str, view: ClusterView) -> bool:
        """Return whether a name is exactly the name of a model in `view`, and not of an alias."""
        return name not in self.aliases and view.has_model(name)

    def may_mean_upstream(self, name: str, view: ClusterView) -> bool:
        """Return whether a name may resolve to an alias with an upstream.

        This is a fast check without resolution. If such aliases exist, the result is True for every name that is not
        `is_plain`.
        """
        return self.has_upstreams and not self.is_plain(name, view)

    def get_profile(self, name: str) -> ProfileSettings:
        """Return a profile by its exact name in the settings (`ModelTarget.profile`). Raise `KeyError` if unknown."""
        return self._profiles[name]

    def find_alias(self, name: str, view: ClusterView) -> str | None:
        """Return the alias to which a name without profile resolves, by the rules 1 to 3 of this module.

        Return None if the name resolves to a model of `view`, or to nothing.
        """
        if name in self.aliases:
            return name
        if not self.aliases or view.has_model(name):
            return None
        whole = self._folded.get(name.casefold())
        if whole is not None or view.has_model(view.resolve_name(name)):
            return whole
        parts = name.casefold().split("/", MAX_NAME_PREFIXES)
        tails = ("/".join(parts[at:]) for at in range(1, len(parts)))
        return next((self._folded[tail] for tail in tails if tail in self._folded), None)

    def resolve(self, name: str, view: ClusterView, limits: KeyLimits) -> ModelTarget | Refused:
        """Resolve the name in a request. Return its target, or the refusal for an unknown profile or a forbidden alias.

        `limits` are the limits of the client's key. An unknown name becomes the only candidate, unchanged. Whether the
        key may use a model is not checked here (`ModelTarget.permitted`).
        """
        target = self._resolve_base(name, view, limits)
        base, _, profile = name.rpartition(":")
        if target is None and base and self._profiles:
            target = self._resolve_base(base, view, limits)
            known = self._folded_profiles.get(profile.casefold())
            if isinstance(target, ModelTarget):
                return self._refuse_profile(base, profile) if known is None else replace(target, profile=known)
        return ModelTarget((name,), name) if target is None else target

    def _resolve_base(self, name: str, view: ClusterView, limits: KeyLimits) -> ModelTarget | Refused | None:
        """Return the target of a name without profile, or its refusal; None for an unknown name."""
        if self.is_plain(name, view):
            return ModelTarget((name,), name)
        visible = filter_view(view, limits)
        alias = self.find_alias(name, visible)
        if alias is None:
            model = visible.resolve_name(name)
            return ModelTarget((model,), model) if view.has_model(model) else None
        candidates = tuple(view.resolve_name(candidate) for candidate in self.aliases[alias])
        if limits.allows(alias):
            return ModelTarget(candidates, alias, alias, upstream=self._upstreams.get(alias, ""))
        permitted = tuple(candidate for candidate in candidates if limits.allows(candidate))
        return ModelTarget(permitted, permitted[0], alias) if permitted else refuse_model(alias, limits)

    def _refuse_profile(self, base: str, profile: str) -> Refused:
        known = ", ".join(sorted(self._profiles))
        text = f"there is no profile {profile[:200]!r} for {base[:200]}; the profiles are {known}"
        return Refused(RefusalCode.NO_MODEL, text)

    def list_visible(self, view: ClusterView, limits: KeyLimits | None) -> "VisibleModels":
        """Return the models and aliases that a key with these limits may use; all of them if `limits` is None."""
        resolved = {alias: self._resolve_base(alias, view, limits or NO_LIMITS) for alias in self.aliases}
        targets = {alias: target for alias, target in resolved.items() if isinstance(target, ModelTarget)}
        nodes = filter_view(view, None if limits is None else replace(limits, models=()))
        return VisibleModels(self, filter_view(view, limits), nodes, targets)


class VisibleModels:
    """Models and aliases that a key may use.

    `names` resolves names. `view` has the nodes that the key may use, with only its permitted models. `nodes` has the
    same nodes with all their models, because an alias permits its candidates. `targets` are the permitted aliases.
    """

    def __init__(
        self, names: ModelNames, view: ClusterView, nodes: ClusterView, targets: dict[str, ModelTarget]
    ) -> None:
        self._names = names
        self._nodes = nodes
        self.view = view
        self.aliases = {alias: target.candidates for alias, target in targets.items()}
        """Models of each alias in order, by alias."""
        self.upstreams = {alias: target.upstream for alias, target in targets.items()}
        """Name of the upstream at the end of each alias, by alias; empty for an alias without one."""

    def list_aliases(self) -> list[str]:
        """Return the aliases, sorted by name."""
        return sorted(self.aliases)

    def find_alias(self, name: str) -> str | None:
        """Return the alias to which a name resolves; None if it resolves to no alias that the key may use."""
        alias = self._names.find_alias(name, self.view)
        return alias if alias in self.aliases else None

    def find_alias_model(self, alias: str) -> Model | None:
        """Return the first candidate of an alias that a node can serve; None if no candidate can be served.

        Raise `KeyError` for an alias that the key may not use.
        """
        served = self._nodes.get_served_models()
        return next((served[model] for model in self.aliases[alias] if model in served), None)

    def is_loaded(self, model: str) -> bool:
        """Return whether a node that the key may use has loaded the model with this own name.

        The model may be one that the key may use only through an alias.
        """
        return model in self._nodes.get_loaded_models()

    def find_model(self, name: str) -> Model | None:
        """Return the model to which a name resolves; None if no node can serve it.

        For an alias, return the model of `find_alias_model` with the alias as its name.
        """
        alias = self.find_alias(name)
        if alias is None:
            return self.view.get_served_models().get(self.view.resolve_name(name))
        model = self.find_alias_model(alias)
        return None if model is None else replace(model, name=alias)
