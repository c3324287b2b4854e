"""Check of the doctor for the system service: installed with an existing Python, and running."""

import os

from coordinator.doctor.finding import Finding, fail, not_here, ok, warn
from coordinator.doctor.host_probe import HostProbe
from coordinator.service.installer import read_existing_unit
from coordinator.service.launchd import parse_own_job
from coordinator.service.service_manager import ServiceError, ServiceHost

REPAIR = "`sudo cluster service install` repairs it"


def check_service(here: HostProbe, manager: ServiceHost | None = None) -> Finding:
    """Check that an installed service runs, and that its Python exists. Fail otherwise.

    Warn if the service cannot be read and, on macOS, if its ProcessType is not Interactive. The check does not apply
    without a service. `manager` is the service manager; None means this machine's.
    """
    host = manager or ServiceHost(here.platform, root=here.root)
    try:
        unit = read_existing_unit(host, host.unit)
        if not unit.text:
            return not_here("no service is installed: `sudo cluster service install` starts macpool at each boot")
        service_state = host.read_state()
    except ServiceError as error:
        return warn(str(error), "`cluster service status` has details")
    if unit.program and not os.access(unit.program[0], os.X_OK):
        return fail(f"the service's Python is missing: {unit.program[0]}", REPAIR)
    if not service_state.running:
        ended = f", last exit: {service_state.last_exit}" if service_state.last_exit else ""
        return fail(f"the service is installed but not running{ended}", f"`cluster service logs` shows why; {REPAIR}")
    kind = str((parse_own_job(unit.text.encode()) or {}).get("ProcessType")) if host.mac else ""
    if host.mac and kind != "Interactive":
        return warn(f"ProcessType is {kind}: macOS throttles the service's CPU and disk", REPAIR)
    return ok(f"the service runs as {unit.user}, process {service_state.pid}", pid=service_state.pid)
