/* A stand-in for the calls of libSystem that node/memory/darwin.py makes, with Apple's signatures and layouts as in
 * <sys/resource.h>, <libproc.h> and <sys/sysctl.h>. The footprint of a process is its resident
 * set, so that a test can compare it with another reading. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct rusage_info_v4 {
    uint8_t ri_uuid[16];
    uint64_t ri_user_time, ri_system_time, ri_pkg_idle_wkups, ri_interrupt_wkups, ri_pageins, ri_wired_size;
    uint64_t ri_resident_size, ri_phys_footprint, ri_proc_start_abstime, ri_proc_exit_abstime;
    uint64_t ri_child_user_time, ri_child_system_time, ri_child_pkg_idle_wkups, ri_child_interrupt_wkups;
    uint64_t ri_child_pageins, ri_child_elapsed_abstime, ri_diskio_bytesread, ri_diskio_byteswritten;
    uint64_t ri_cpu_time_qos[7], ri_billed_system_time, ri_serviced_system_time, ri_logical_writes;
    uint64_t ri_lifetime_max_phys_footprint, ri_instructions, ri_cycles, ri_billed_energy, ri_serviced_energy;
    uint64_t ri_interval_max_phys_footprint, ri_runnable_time;
};

_Static_assert(sizeof(struct rusage_info_v4) == 296, "rusage_info_v4");

_Static_assert(offsetof(struct rusage_info_v4, ri_phys_footprint) == 72, "phys_footprint");
_Static_assert(offsetof(struct rusage_info_v4, ri_lifetime_max_phys_footprint) == 240, "lifetime_max_phys_footprint");
_Static_assert(offsetof(struct rusage_info_v4, ri_interval_max_phys_footprint) == 280, "interval_max_phys_footprint");

/* The high-water marks are those of the last process that was asked about. */
static uint64_t lifetime, interval;

static uint64_t max(uint64_t one, uint64_t other) { return one > other ? one : other; }

int proc_pid_rusage(int pid, int flavor, void *buffer) {
    char path[64];
    long pages = 0;
    snprintf(path, sizeof path, "/proc/%d/statm", pid);
    FILE *file = flavor == 4 ? fopen(path, "r") : NULL;
    if (file == NULL) return -1;
    int read = fscanf(file, "%*d %ld", &pages);
    fclose(file);
    if (read != 1) return -1;
    struct rusage_info_v4 *usage = buffer;
    memset(usage, 0x5a, sizeof *usage);
    usage->ri_phys_footprint = (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE);
    usage->ri_lifetime_max_phys_footprint = lifetime = max(lifetime, usage->ri_phys_footprint);
    usage->ri_interval_max_phys_footprint = interval = max(interval, usage->ri_phys_footprint);
    return 0;
}

struct proc_bsdinfo {
    uint32_t pbi_flags, pbi_status, pbi_xstatus, pbi_pid, pbi_ppid, pbi_uid, pbi_gid, pbi_ruid, pbi_rgid, pbi_svuid;
    uint32_t pbi_svgid, rfu_1;
    char pbi_comm[16], pbi_name[32];
    uint32_t pbi_nfiles, pbi_pgid, pbi_pjobc, e_tdev, e_tpgid;
    int32_t pbi_nice;
    uint64_t pbi_start_tvsec, pbi_start_tvusec;
};

_Static_assert(sizeof(struct proc_bsdinfo) == 136, "proc_bsdinfo");
_Static_assert(offsetof(struct proc_bsdinfo, pbi_start_tvsec) == 120, "pbi_start_tvsec");

static int stat_of(int pid, char *state, int *group, unsigned long long *start) {
    char path[64], line[1024], *rest;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (file == NULL) return 0;
    size_t length = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    line[length] = 0;
    rest = strrchr(line, ')');
    return rest && sscanf(rest + 1,
        " %c %*d %d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", state, group, start) == 3;
}

int proc_pidinfo(int pid, int flavor, uint64_t argument, void *buffer, int size) {
    struct proc_bsdinfo *info = buffer;
    char state;
    int group;
    unsigned long long start;
    if (flavor != 3 || argument != 0 || size != sizeof *info || !stat_of(pid, &state, &group, &start)) return 0;
    memset(info, 0x5a, sizeof *info);
    info->pbi_status = state == 'Z' ? 5 : 2;
    info->pbi_pgid = (uint32_t)group;
    info->pbi_start_tvsec = start / 100;
    info->pbi_start_tvusec = start % 100 * 10000;
    return size;
}

#ifndef WITHOUT_RESET
int proc_reset_footprint_interval(int pid) {
    if (pid <= 0) return -1;
    interval = 0;
    return 0;
}
#endif

static int give(const void *value, size_t size, void *old, size_t *oldlen) {
    if (*oldlen < size) return -1;
    memcpy(old, value, size);
    *oldlen = size;
    return 0;
}

int sysctlbyname(const char *name, void *old, size_t *oldlen, void *new_value, size_t new_size) {
    (void)new_value, (void)new_size;
    const char *wired = getenv("STANDIN_WIRED_MB");
    if (strcmp(name, "iogpu.wired_limit_mb") == 0 && !getenv("STANDIN_WIRED_FAIL")) {
        int32_t limit = wired ? atoi(wired) : 0;
        return give(&limit, sizeof limit, old, oldlen);
    }
    if (strcmp(name, "kern.memorystatus_vm_pressure_level") == 0 && getenv("STANDIN_PRESSURE")) {
        int32_t level = atoi(getenv("STANDIN_PRESSURE"));
        return give(&level, sizeof level, old, oldlen);
    }
    if (strcmp(name, "machdep.cpu.brand_string") == 0) return give("Apple M5 Max", 13, old, oldlen);
    return -1;
}
