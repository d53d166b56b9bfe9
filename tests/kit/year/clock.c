// The time of day as a file says it: seconds and nanoseconds are those of the system plus a number that another process sets.
// Loaded by LD_PRELOAD; see clock.py. Clocks that only measure how long something takes go on as they are.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t none = 0, *ahead = &none;

__attribute__((constructor)) static void look_up(void) {
    const char *path = getenv("DEDUP_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) ahead = mapped;
    close(file);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "clock_gettime");
    int got = real(id, now);
    if (got == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *ahead;
    return got;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "gettimeofday");
    int got = real(now, zone);
    if (got == 0) now->tv_sec += *ahead;
    return got;
}

time_t time(time_t *stored) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (stored) *stored = now.tv_sec;
    return now.tv_sec;
}

// Who waits until a moment of the time of day has computed it from the clock above; the system counts by its own. Moments of other clocks,
// which begin with the machine, are small numbers.
static const struct timespec *system_time(const struct timespec *until, struct timespec *own) {
    if (until->tv_sec < 1000000000) return until;
    *own = *until;
    own->tv_sec -= *ahead;
    return own;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) *(void **)&real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec own;
    return real(condition, mutex, system_time(until, &own));
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec own;
    return real(semaphore, system_time(until, &own));
}
