"""What of the cluster a key may see: the models that it may use, on the nodes that have its labels. Pure."""

from dataclasses import replace

import msgspec

from router.admission.rate_limits import KeyLimits
from router.placement.cluster_view import ClusterView, NodeView


def visible(view: ClusterView, limits: KeyLimits | None) -> ClusterView:
    """Return the cluster as far as a key with these limits may use it."""
    if limits is None or not (limits.models or limits.labels):
        return view
    labels = frozenset(limits.labels)
    return ClusterView(tuple(_seen(node, limits) for node in view.nodes if labels <= node.labels))


def _seen(node: NodeView, limits: KeyLimits) -> NodeView:
    models = {name: model for name, model in node.models.items() if limits.allows(name)}
    packages = tuple(package for package in node.video.packages if limits.allows(package.name))
    return replace(node, models=models, video=msgspec.structs.replace(node.video, packages=packages))
