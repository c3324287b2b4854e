"""Links of nodes: the cluster port, connections, the table of links, admission, fetches and queries."""
