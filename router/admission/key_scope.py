"""Reduce the view of the cluster to the nodes with the labels of an API key, and to its permitted models. Pure."""

from dataclasses import replace

import msgspec

from router.admission.rate_limits import KeyLimits
from router.placement.cluster_view import ClusterView, NodeView


def filter_view(view: ClusterView, limits: KeyLimits | None) -> ClusterView:
    """Return a view of only the nodes, models and video packages that a key with these limits may use.

    Return `view` itself for a key without limits (None), or with neither model limits nor label limits.
    """
    if limits is None or not (limits.models or limits.labels):
        return view
    labels = frozenset(limits.labels)
    return ClusterView(tuple(_filter_node(node, limits) for node in view.nodes if labels <= node.labels))


def _filter_node(node: NodeView, limits: KeyLimits) -> NodeView:
    models = {name: model for name, model in node.models.items() if limits.allows(name)}
    packages = tuple(package for package in node.video.packages if limits.allows(package.name))
    return replace(node, models=models, video=msgspec.structs.replace(node.video, packages=packages))
