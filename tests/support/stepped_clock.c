/* Shifts the wall clock of a process by an offset that another process writes while it runs.
 *
 * Loaded with LD_PRELOAD. SPECDEC_TEST_CLOCK names a file of eight bytes: the offset in nanoseconds, int64 in the
 * machine's byte order. Monotonic clocks stay as they are, as under a stepped clock. The real time comes from the
 * kernel directly: a look-up of the C library's function would allocate, and an allocator may ask for the time.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t second_ns = 1000000000;
static const volatile int64_t *offset_ns;

__attribute__((constructor)) static void open_clock(void) {
    const char *path = getenv("SPECDEC_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) {
        _exit(127);
    }
    void *mapped = mmap(NULL, sizeof *offset_ns, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) {
        _exit(127);
    }
    offset_ns = mapped;
}

static int is_wall_clock(clockid_t clock) {
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && offset_ns && is_wall_clock(clock)) {
        int64_t shown_ns = now->tv_sec * second_ns + now->tv_nsec + *offset_ns;
        now->tv_sec = shown_ns / second_ns;
        now->tv_nsec = shown_ns % second_ns;
    }
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec shown;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &shown)) {
        return -1;
    }
    now->tv_sec = shown.tv_sec;
    now->tv_usec = shown.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *kept) {
    struct timespec shown;
    clock_gettime(CLOCK_REALTIME, &shown);
    if (kept) {
        *kept = shown.tv_sec;
    }
    return shown.tv_sec;
}
