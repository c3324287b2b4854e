/* A stand-in for the calls of IOKit and CoreFoundation that host/iokit.py makes, with Apple's signatures as in
 * <IOKit/pwr_mgt/IOPMLib.h> and <CoreFoundation/CFRunLoop.h>. The run loop plays one night: it asks whether it may sleep,
 * says that it will, wakes, and then waits until it is stopped. What was answered is told by `answers`. */
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

typedef void (*callback_t)(void *refcon, uint32_t service, uint32_t message, void *argument);

static callback_t told;
static int order[8], count;
static volatile int stopped, refuse, sources, deregistered, stops;
static int loop, source;
const void *kCFRunLoopDefaultMode = "default";

uint32_t IORegisterForSystemPower(void *refcon, void **port, callback_t callback, uint32_t *notifier) {
    usleep(20000);
    told = callback;
    *notifier = 7;
    if (refuse != 1 && refuse != 3) *port = &source;
    return refuse == 1 || refuse == 2 ? 0 : 42;
}
int IODeregisterForSystemPower(uint32_t *notifier) {
    deregistered += *notifier == 7;
    return *notifier == 7 ? 0 : 1;
}
int IOAllowPowerChange(uint32_t root, void *argument) {
    if (root == 42 && count < 8) order[count++] = (int)(intptr_t)argument;
    return 0;
}
void *IONotificationPortGetRunLoopSource(void *port) { return port == &source ? &source : NULL; }
void *CFRunLoopGetCurrent(void) { return &loop; }
void CFRunLoopAddSource(void *where, void *what, const void *mode) {
    if (where != &loop || what != &source || mode != kCFRunLoopDefaultMode) abort();
    sources++;
}
void CFRunLoopRun(void) {
    if (!sources) return;
    told(NULL, 1, 0xE0000270, (void *)11);
    told(NULL, 1, 0xE0000270, NULL);
    told(NULL, 1, 0xE0000280, (void *)12);
    told(NULL, 1, 0xE0000290, (void *)13);
    told(NULL, 1, 0xE0000320, (void *)13);
    told(NULL, 1, 0xE0000300, (void *)14);
    while (!stopped) usleep(1000);
}
void CFRunLoopStop(void *where) {
    stopped = where == &loop;
    stops++;
}
int answers(int number) { return number < count ? order[number] : -1; }
/* 1: neither a connection nor a port, 2: only a port, 3: only a connection */
void refuse_with(int how) { refuse = how; }
int deregistrations(void) { return deregistered; }
int stop_calls(void) { return stops; }
