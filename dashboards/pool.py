"""The pool at a glance: is it healthy, who has room, what is running out."""

from dashboards.panels import (
    BYTES,
    COUNT,
    PER_SECOND,
    REQUESTS,
    SECONDS,
    SHARE,
    Board,
    figure,
    lines,
    listing,
    states,
)

GLANCE = (
    figure("Nodes ready", "Members to which requests go.", COUNT, 'macpool_cluster_nodes{state="ready"}',
           bad=1, below=True),
    figure("Conditions", "What needs a person now: see Conditions below, and the runbook.", COUNT,
           "sum(macpool_condition_active)", bad=1),
    figure("Gates not armed", "Nodes whose gate could not refuse on facts. They refuse everything, or have no guard.",
           COUNT, "count(macpool_gate_armed == 0) or vector(0)", bad=1),
    figure("Headroom of the pool", "What all nodes together have room for, as placement sees it.", BYTES,
           "sum(clamp_min(macpool_cluster_node_headroom_bytes, 0))", bad=1, below=True),
    figure("Requests", "Ended requests per second.", REQUESTS,
           "sum(rate(macpool_router_requests_total[$__rate_interval]))"),
    figure("In line", "Requests that wait for a node with room.", COUNT, "macpool_router_queue_depth"),
)  # fmt: skip
MEMORY = (
    lines("Headroom as placement sees it", "Of the newest report, with what is reusable, less what was promised since. "
          "A request goes only where it fits.", BYTES, ("macpool_cluster_node_headroom_bytes", "{{node}}")),
    lines("Current of ceiling", "How full each node is, by what its gate compares; at 1 nothing fits, the margin "
          "already before.", SHARE,
          ("macpool_node_memory_current_bytes / macpool_node_memory_ceiling_bytes", "{{node}}")),
    lines("Reserved by the router", "Promised to requests, and not in the node's report yet.", BYTES,
          ("macpool_router_reserved_bytes", "{{node}}")),
    lines("Refusals by gates", "Refusals per second; a request may meet several and still be answered.", PER_SECOND,
          ("sum by (node, reason) (rate(macpool_gate_refusals_total[$__rate_interval]))", "{{node}} {{reason}}")),
)  # fmt: skip
TRAFFIC = (
    lines("In flight", "Requests on each node.", COUNT, ("macpool_router_in_flight_requests", "{{node}}")),
    lines("Placements", "Requests sent to each node per second.", PER_SECOND,
          ("rate(macpool_router_placements_total[$__rate_interval])", "{{node}}")),
    lines("Tokens", "Read and written per second.", PER_SECOND,
          ("sum(rate(macpool_prompt_tokens_total[$__rate_interval]))", "prompt"),
          ("sum(rate(macpool_generation_tokens_total[$__rate_interval]))", "generated")),
    lines("Outcomes", "How requests end, per second.", PER_SECOND,
          ("sum by (outcome) (rate(macpool_router_requests_total[$__rate_interval]))", "{{outcome}}")),
)  # fmt: skip
MEMBERS = (
    states("States", "The state of each member.", "macpool_cluster_node_state", "{{node}} {{state}}"),
    states("Conditions", "What held when; the names are those of the alerts and of the runbook.",
           "macpool_condition_active", "{{condition}}"),
    lines("Silence", "Time since each member's newest report; from 3 s on it gets nothing new.", SECONDS,
          ("time() - macpool_cluster_node_report_timestamp_seconds", "{{node}}")),
    lines("Members by state", "How many members are in each state.", COUNT, ("macpool_cluster_nodes", "{{state}}")),
    lines("Breakers, cordons, pauses",
          "1 while a node gets nothing: its engine keeps failing, a person said so, or its owner wants the memory.",
          COUNT,
          ("macpool_router_breaker_open", "breaker {{node}}"), ("macpool_cluster_node_cordoned", "cordon {{node}}"),
          ("macpool_cluster_node_paused", "paused {{node}}")),
    lines("Pauses end in", "Time until a paused node takes work again, where that is known.", SECONDS,
          ("macpool_cluster_node_paused_until_timestamp_seconds - time()", "{{node}}")),
    lines("Links", "Open links, and connections to the cluster port that are none.", COUNT,
          ("macpool_cluster_links", "links"), ("macpool_cluster_strangers", "strangers")),
    lines("Links made and denied", "Per second; many mean that a node comes and goes, or that somebody tries.",
          PER_SECOND, ("rate(macpool_cluster_links_made_total[$__rate_interval])", "made"),
          ("rate(macpool_cluster_links_denied_total[$__rate_interval])", "denied"),
          ("rate(macpool_router_breakers_opened_total[$__rate_interval])", "breakers opened")),
    lines("Model swaps", "Turns per second in which a busy model makes room for a waiting one.", PER_SECOND,
          ("rate(macpool_router_swaps_total[$__rate_interval])", "{{outcome}}")),
    lines("Models that differ", "Different models that members hold under one name.", COUNT,
          ("macpool_cluster_model_fingerprints", "{{model}}")),
    lines("Certificates", "Time that is left of each; they renew themselves at a third.", SECONDS,
          ("macpool_tls_expires_timestamp_seconds - time()", "{{certificate}}"),
          ("macpool_cluster_node_certificate_expires_timestamp_seconds - time()", "{{node}}")),
)  # fmt: skip
SELF = (
    figure("Reservation leaks", "Reservations that belong to no request: anything but 0 is a bug.", COUNT,
           "macpool_router_reservation_leaks", bad=1),
    figure("Cut off", "1 while half of the members fell silent at once: look at this machine's own network.", COUNT,
           "macpool_cluster_self_suspect", bad=1),
    figure("Uptime", "Of the coordinator.", SECONDS, "time() - macpool_process_start_time_seconds"),
    figure("Files", "Open files and connections, of those that are allowed.", SHARE,
           "macpool_process_open_fds / macpool_process_max_fds", bad=0.9),
    figure("Memory", "The most that the coordinator ever had.", BYTES, "macpool_process_peak_resident_bytes"),
    figure("Keys refused", "Keys that were shown and not known, in the last hour.", COUNT,
           "increase(macpool_auth_refused_keys_total[1h])"),
    lines("CPU", "Of the coordinator and of the agents, in cores.", SHARE,
          ("rate(macpool_process_cpu_seconds_total[$__rate_interval])", "coordinator"),
          ("rate(macpool_node_agent_cpu_seconds_total[$__rate_interval])", "agent of {{node}}")),
    listing("Build", "What the coordinator runs.", "macpool_build_info", 12),
)  # fmt: skip
BOARD = Board(
    "macpool-pool", "Macpool: pool", "Is the pool healthy, who has room, what is running out.",
    (("At a glance", GLANCE), ("Memory", MEMORY), ("Traffic", TRAFFIC), ("Members", MEMBERS), ("Coordinator", SELF)),
)  # fmt: skip
