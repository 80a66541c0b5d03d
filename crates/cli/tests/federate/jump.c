/* A wall clock that jumps eleven hours to and fro every second, for LD_PRELOAD. Other clocks are as they are. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *at) {
    int result = (int)syscall(SYS_clock_gettime, id, at);
    if (result == 0 && id == CLOCK_REALTIME)
        at->tv_sec += at->tv_sec % 2 ? 40000 : -40000;
    return result;
}
