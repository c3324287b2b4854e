"""The cluster: membership, certificates, keys, links, and the processes that hold them."""
