"""Links of nodes: the cluster port, connections, the table of links, admission, fetches, queries and relays."""
