"""Settings of a node's agent, sharing rule and video worker."""

from typing import Annotated

from msgspec import Meta

from host.settings_loader import Section


class WorkerSettings(Section, frozen=True):
    """Settings of video generation on this node (`[worker]`); `[video]` has those of the coordinator.

    Memory is leased to a worker process for one job at a time.
    """

    enabled: Annotated[
        bool,
        Meta(
            description=(
                "Offer video if the environment is installed (`cluster video install`) and a video package is "
                "present. Otherwise no video process runs."
            )
        ),
    ] = True
    environments: Annotated[
        str,
        Meta(
            description=(
                "Folder of the environments that `cluster video install` creates. Empty: STATE/node/video/environments."
            )
        ),
    ] = ""
    job_timeout_seconds: Annotated[
        float,
        Meta(
            ge=1,
            le=10**6,
            description=("Maximum time of a job that sets no other limit. Then its worker is ended."),
        ),
    ] = 7200.0
    stall_timeout_seconds: Annotated[
        float,
        Meta(
            ge=1,
            le=10**6,
            description=("Maximum time without a step, a phase or a transformer block. Then the worker is ended."),
        ),
    ] = 300.0
    start_timeout_seconds: Annotated[
        float,
        Meta(
            ge=1,
            le=10**4,
            description=("Maximum time that a granted lease waits for its worker. Then the lease is released."),
        ),
    ] = 90.0
    terminate_grace_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=60,
            description=(
                "Seconds between SIGTERM and SIGKILL for a worker. A worker that exceeds its lease gets "
                "SIGKILL at once."
            ),
        ),
    ] = 1.0
    ray_ports: Annotated[
        int,
        Meta(
            ge=1024,
            le=65400,
            description=("First of 60 consecutive loopback ports for the Ray of this node."),
        ),
    ] = 6480
    ray_folder: Annotated[
        str,
        Meta(
            description=(
                "Folder for sockets and logs of Ray. Its path must be short, because macOS limits socket "
                "paths to 103 bytes. Empty: a folder below /tmp."
            )
        ),
    ] = ""


class AgentSettings(Section, frozen=True):
    """Settings of the agent: name, reports, sleep, machine id and log (`[node]`)."""

    name: Annotated[str, Meta(description="Display name of this node. Empty: its host name.")] = ""
    report_busy_seconds: Annotated[
        float, Meta(ge=0.05, le=5, description=("Seconds between two reports while the engine is busy."))
    ] = 0.5
    report_idle_seconds: Annotated[
        float,
        Meta(
            ge=0.05,
            le=5,
            description=(
                "Seconds between two reports while the engine is idle. The coordinator suspects a node after "
                "3 s without a report."
            ),
        ),
    ] = 1.0
    stay_awake: Annotated[
        str,
        Meta(
            description=(
                'macOS: prevention of idle sleep: "busy" (while the node works, also on a pull, and for one minute '
                'after), "always", or "never". Lid and menu always put the Mac to sleep.'
            )
        ),
    ] = "busy"
    machine: Annotated[
        str,
        Meta(
            description=(
                "Replaces the id of the machine, to which a certificate is bound; for two nodes on one "
                "machine. Empty: the machine's own id."
            )
        ),
    ] = ""
    log_level: Annotated[str, Meta(description="Minimum level of logged events: debug, info, warning or error.")] = (
        "info"
    )


class SharingSettings(Section, frozen=True):
    """Settings of the times at which this Mac accepts work, and of the work that runs when they end (`[sharing]`)."""

    when: Annotated[
        str,
        Meta(
            description=(
                'Times at which this Mac accepts work: "always", "plugged-in" (on mains power), "idle" (after '
                'sharing.idle_seconds without input), or "hours" (within sharing.hours). At other times the '
                "node refuses new work and releases its memory. `cluster pause` takes precedence."
            )
        ),
    ] = "always"
    hours: Annotated[
        str,
        Meta(
            description=(
                'Hours for sharing.when = "hours" by this Mac\'s clock: "22:00-07:00"; several spans are '
                "separated by commas."
            )
        ),
    ] = ""
    idle_seconds: Annotated[
        float,
        Meta(
            ge=1,
            le=86400,
            description=('Seconds without input at keyboard, mouse or screen for sharing.when = "idle".'),
        ),
    ] = 600.0
    min_battery_percent: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description=(
                "Minimum charge in percent to accept work on battery, with any sharing.when. After a lower "
                "charge, work is accepted again 5 % above it or on mains power. 0: the charge is ignored. A "
                "machine without a battery counts as plugged in."
            ),
        ),
    ] = 0
    grace_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description=(
                "Maximum time that running requests without another node continue after this Mac stops sharing."
            ),
        ),
    ] = 30.0
    video_grace_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description=(
                "Maximum time that a video job continues after this Mac stops sharing. Then the job ends as "
                "video.on_node_loss defines."
            ),
        ),
    ] = 300.0
