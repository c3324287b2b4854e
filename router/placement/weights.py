"""Weights and limits of placement, each with its unit, its meaning and the command by which it was chosen.

The commands are `python -m tests.bench simulation`, which runs the scenarios of `tests/sim/scenarios`, and `cluster
simulate household` and `lab` with seeds 1 to 3. A value without a command follows from its meaning.
"""

HEADROOM_SATURATION = 2
"""Number of requests of the same size for which a node needs room to get full marks.

In simulations of tight memory, 2 is better than 4 and 8.

Chosen by `python -m tests.bench simulation`, scenario `tight`.
"""
PREFIX_HIT_SHARE = 0.5
"""Cached share of the prompt, 0 to 1, from which on a node gets full marks if the request fits.

The cache may already have most of the memory that such a request needs, and makes room for it. Chosen by `cluster
simulate household`.
"""
MIN_LOAD_LEFT_SHARE = 0.1
"""Minimum share of a load, 0 to 1, that counts as remaining until the model is loaded.

After the weights are read, the node still compiles kernels and measures a first profile.
"""
UNKNOWN_LOAD_LEFT_SHARE = 0.5
"""Share of a load that counts as remaining if the node reports no progress: half on average."""
TTFT_STEP_SECONDS = 0.05
"""Resolution of the expected time in seconds. Smaller differences are noise of the measured speed."""
PREFILL_SLOWDOWN_WHILE_DECODING = 1.6
"""Factor by which prefill slows down while rows decode, because the rows keep their share of the machine.

Measured by `python -m tests.bench itl`.
"""
BUSY_STEPS = 4
"""Steps per doubling of in-flight requests relative to speed, so that machines of nearly equal speed count as equal.

Chosen by `cluster simulate lab`.
"""
ANSWER_WEIGHT = 0.3
"""Weight of a second of the request's own answer; a second until the first token has weight 1.

Chosen by `cluster simulate household` and `lab`: a larger weight makes the slowest requests wait longer than
necessary, a smaller weight delays the end of all answers.
"""
ROW_WEIGHT = 0.1
"""Weight of a second for which another row stalls; a second until the first token has weight 1.

Chosen with `ANSWER_WEIGHT`.
"""
MIN_RETRY_SECONDS = 1.0
"""Minimum of an estimated Retry-After in seconds, so that clients do not poll faster."""
MAX_RETRY_SECONDS = 60.0
"""Maximum of an estimated Retry-After in seconds, because official SDKs ignore longer waits."""
UNKNOWN_RETRY_SECONDS = 2.0
"""Retry-After in seconds without an estimate: twice the interval of an idle node's reports."""
QUEUE_BACKLOG_SECONDS = 5.0
"""Prefill backlog of the best node, in seconds, above which a request of a greedy key is queued.

A greedy key requests far more than its share (`router.admission.key_load`). Nodes are fair between keys, but their
memory is reserved in order of arrival. Without this rule, a greedy key would fill the memory of all nodes. Chosen by
`cluster simulate tests/sim/scenarios/greedy.toml` (docs/decisions/0037-one-way-of-placement.md).
"""
SPARE_MEMORY_SHARE = 0.5
"""Share of a node's memory for prompts and answers, 0 to 1, that is kept free of the requests of greedy keys.

At its deadline, a request of a greedy key is sent if that share stays free, and refused otherwise. Chosen by the same
command as `QUEUE_BACKLOG_SECONDS`.
"""
